"""What the Python distributions of an image say of themselves, read and never imported."""

from __future__ import annotations

import ast
import configparser
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from email.parser import HeaderParser

from packaging.utils import canonicalize_name

from sparkpin.modwheels import KERNELS

PLUGINS = "vllm.general_plugins"
VERSIONS, TOUCHES = (
    "VLLM_VERSIONS",
    "TOUCHES",
)  # a mod's own list of the vLLM releases that it was made for; a table by release
DIST_INFO = re.compile(r"(?P<site>(?:.*/)?)(?P<stem>[^/]+)\.dist-info/(?P<file>METADATA|entry_points\.txt)")
SMALL = 1 << 20  # bytes of a text that is read


@dataclass(frozen=True)
class Package:
    """A distribution. name: normalised; site: its folder, with a slash at the end. plugins: modules of its entry points
    for vLLM. accepts: releases of vLLM that its modules name as theirs; none where they name none. kernels: of the mods
    whose GPU kernels it can compile ahead."""

    name: str
    version: str
    site: str
    folder: str
    plugins: tuple[str, ...] = ()
    accepts: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Torch:
    """torch/version.py. cuda: "13.0", or "" for a build without."""

    path: str
    version: str
    cuda: str


def packages_of(texts: Mapping[str, str]) -> tuple[Package, ...]:
    """From the texts that `scan` has kept, by path."""
    found = []
    for path, text in sorted(texts.items()):
        info = DIST_INFO.fullmatch(path)
        if not info or info["file"] != "METADATA":
            continue
        head = HeaderParser().parsestr(text, headersonly=True)
        folder = path.rpartition("/")[0]
        points = texts.get(f"{folder}/entry_points.txt", "")
        modules = [value.partition(":")[0].strip() for value in entry_points(points, PLUGINS).values()]
        accepts = {
            version
            for module in modules
            for file, source in texts.items()
            if file.startswith(f"{info['site']}{module.partition('.')[0]}/") and file.endswith(".py")
            for version in (*strings(source, VERSIONS), *keys(source, TOUCHES))
        }
        name = canonicalize_name(head.get("Name") or info["stem"].partition("-")[0])
        found.append(
            Package(
                name,
                head.get("Version") or "",
                info["site"],
                folder,
                tuple(modules),
                tuple(sorted(accepts)),
                tuple(entry_points(points, KERNELS)),
            )
        )
    return tuple(found)


def entry_points(text: str, group: str) -> dict[str, str]:
    """Name -> value of the entry points of a group; none where the file is none."""
    parser = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    try:
        parser.read_string(text)
    except configparser.Error:
        return {}
    return dict(parser[group]) if group in parser else {}


def assigned(source: str, name: str) -> Iterable[ast.expr]:
    """What a module assigns to a name at its top."""
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for line in body:
        targets = (
            line.targets if isinstance(line, ast.Assign) else [line.target] if isinstance(line, ast.AnnAssign) else []
        )
        value = line.value if isinstance(line, ast.Assign | ast.AnnAssign) else None
        if value is not None and any(isinstance(target, ast.Name) and target.id == name for target in targets):
            yield value


def strings(source: str, name: str) -> list[str]:
    """The texts in what a module assigns to a name: one, or those of a tuple, list or dict."""
    nodes = [node for value in assigned(source, name) for node in ast.walk(value)]
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def keys(source: str, name: str) -> list[str]:
    """The keys that are texts, of the dict that a module assigns to a name."""
    tables = [value for value in assigned(source, name) if isinstance(value, ast.Dict)]
    nodes = [key for table in tables for key in table.keys if isinstance(key, ast.Constant)]
    return [node.value for node in nodes if isinstance(node.value, str)]


def torch_of(texts: Mapping[str, str]) -> Torch | None:
    for path, text in sorted(texts.items()):
        if path.endswith("torch/version.py"):
            version, cuda = strings(text, "__version__"), strings(text, "cuda")
            return Torch(path, version[0] if version else "?", cuda[0] if cuda else "")
    return None
