"""What the Python distributions of an image say of themselves, read and never imported."""

from __future__ import annotations

import ast
import configparser
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from email.parser import HeaderParser

from packaging.utils import canonicalize_name

from sparkpin.pins.mods import KERNELS

PLUGINS = "vllm.general_plugins"
# Where a mod names the vLLM releases that it was made for: a list of them, or the keys of a table.
VERSIONS, TOUCHES = "VLLM_VERSIONS", "TOUCHES"
DIST_INFO = re.compile(r"(?P<site>(?:.*/)?)(?P<stem>[^/]+)\.dist-info/(?P<file>METADATA|entry_points\.txt)")
SMALL = 1 << 20  # bytes of a text that is read


@dataclass(frozen=True)
class InstalledPackage:
    """A distribution."""

    name: str  # normalised
    version: str
    site: str  # the folder that it was installed into, with a slash at the end
    folder: str  # its .dist-info
    plugins: tuple[str, ...] = ()  # modules of its entry points for vLLM
    accepts: tuple[str, ...] = ()  # releases of vLLM that its modules name as theirs
    kernels: tuple[str, ...] = ()  # mods whose GPU kernels it can compile ahead


@dataclass(frozen=True)
class Torch:
    path: str  # torch/version.py
    version: str
    cuda: str  # "13.0", or "" for a build without


def packages_of(texts: Mapping[str, str]) -> tuple[InstalledPackage, ...]:
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
            for version in releases(source)
        }
        name = canonicalize_name(head.get("Name") or info["stem"].partition("-")[0])
        found.append(
            InstalledPackage(
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


def releases(source: str) -> Iterator[str]:
    """What a mod's module says of the vLLM releases that it was made for."""
    values = assigned(source)
    for value in values.get(VERSIONS, ()):
        yield from texts_in(ast.walk(value))
    for value in values.get(TOUCHES, ()):
        yield from texts_in(value.keys if isinstance(value, ast.Dict) else ())


def assigned(source: str) -> dict[str, list[ast.expr]]:
    """What a module assigns to names at its top, by name; nothing where it is no Python."""
    found: dict[str, list[ast.expr]] = {}
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return found
    for line in body:
        if isinstance(line, ast.Assign | ast.AnnAssign) and line.value is not None:
            for target in line.targets if isinstance(line, ast.Assign) else [line.target]:
                if isinstance(target, ast.Name):
                    found.setdefault(target.id, []).append(line.value)
    return found


def texts_in(nodes: Iterable[ast.AST | None]) -> list[str]:
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def torch_of(texts: Mapping[str, str]) -> Torch | None:
    for path, text in sorted(texts.items()):
        if path.endswith("torch/version.py"):
            values = assigned(text)
            version, cuda = (texts_in(values.get(name, ())) for name in ("__version__", "cuda"))
            return Torch(path, version[0] if version else "?", cuda[0] if cuda else "")
    return None
