"""What the Python distributions of an image say of themselves, read and never imported."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution
from typing import Any

from packaging.utils import canonicalize_name

from sparkpin.pins.mods import KERNELS

PLUGINS = "vllm.general_plugins"
# Where a mod names the vLLM releases that it was made for: a list of them, or the keys of a table.
VERSIONS, TOUCHES = "VLLM_VERSIONS", "TOUCHES"
DIST_INFO = r"(.*/)?[^/]+\.dist-info/(METADATA|entry_points\.txt)"
SMALL = 1 << 20  # bytes of a text that is read


class ReadDistribution(Distribution):
    """A distribution of an image, from its texts."""

    def __init__(self, folder: str, texts: Mapping[str, str]) -> None:
        self.folder, self.texts = folder, texts

    def read_text(self, filename: str) -> str | None:
        return self.texts.get(f"{self.folder}/{filename}")

    def locate_file(self, path: str | os.PathLike[str]) -> Any:
        raise FileNotFoundError(path)


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
    for folder in sorted(path.removesuffix("/METADATA") for path in texts if path.endswith(".dist-info/METADATA")):
        read = ReadDistribution(folder, texts)
        site, stem = folder[: folder.rfind("/") + 1], folder.rpartition("/")[2]
        plugins = [point.module for point in read.entry_points.select(group=PLUGINS)]
        homes = tuple(f"{site}{module.partition('.')[0]}/" for module in plugins)
        sources = [text for file, text in texts.items() if homes and file.startswith(homes) and file.endswith(".py")]
        found.append(
            InstalledPackage(
                name=canonicalize_name(read.metadata["Name"] or stem.partition("-")[0]),
                version=read.metadata["Version"] or "",
                site=site,
                folder=folder,
                plugins=tuple(plugins),
                accepts=tuple(sorted({version for source in sources for version in releases(source)})),
                kernels=tuple(point.name for point in read.entry_points.select(group=KERNELS)),
            )
        )
    return tuple(found)


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
