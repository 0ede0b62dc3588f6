"""All that the rules need to know of an image, gathered in one pass over its files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from sparkpin.core.errors import InspectionError
from sparkpin.core.terminal import say
from sparkpin.smoke.inspect import elf
from sparkpin.smoke.inspect.elf import Library
from sparkpin.smoke.inspect.packages import DIST_INFO, SMALL, InstalledPackage, Torch, packages_of, torch_of
from sparkpin.smoke.inspect.tree import FoundPath

KERNELS = re.compile(r"(opt/sparkpin/kernels/[^/]+)/(.*\.cubin|kernels\.json)")  # mods/modkit writes them
TEXTS = re.compile(
    rf"{DIST_INFO}|opt/sparkpin/kernels/[^/]+/kernels\.json"
    r"|(.*/)?torch/version\.py|(.*/)?sparkpin_\w+/.*\.py"
)
EVERY = 100  # libraries between two lines of progress


@dataclass(frozen=True)
class ImageFacts:
    libraries: Mapping[str, Library]  # by path, links followed
    links: Mapping[str, str]  # path -> target
    packages: tuple[InstalledPackage, ...] = ()
    torch: Torch | None = None
    broken: Mapping[str, str] = field(default_factory=dict)  # path -> what is wrong with the file
    cubins: Mapping[str, int] = field(default_factory=dict)  # folder of a mod's kernels -> how many lie in it
    files: int = 0
    size: int = 0  # bytes
    manifests: Mapping[str, str] = field(default_factory=dict)  # folder of a mod's kernels -> the list of them

    def package(self, name: str) -> InstalledPackage | None:
        return next((package for package in self.packages if package.name == name), None)


def scan(found: Iterable[FoundPath]) -> ImageFacts:
    libraries: dict[str, Library] = {}
    links: dict[str, str] = {}
    texts: dict[str, str] = {}
    broken: dict[str, str] = {}
    cubins, manifests = Counter[str](), dict[str, str]()
    files = size = 0
    for file in found:
        if file.link:
            links[file.path] = file.link
            continue
        files, size = files + 1, size + file.size
        if kernels := KERNELS.fullmatch(file.path):
            cubins[kernels[1]] += file.path.endswith(".cubin")
        if TEXTS.fullmatch(file.path) and file.size <= SMALL:
            with file.open() as source:
                texts[file.path] = source.read().decode("utf-8", "replace")
            if kernels:
                manifests[kernels[1]] = texts[file.path]
        elif may_be_library(file):
            try:
                with file.open() as source:
                    library = elf.read_library(source, file.path) if source.read(4) == elf.MAGIC else None
            except InspectionError as error:
                broken[file.path] = error.message
                continue
            if library:
                libraries[file.path] = library
                if len(libraries) % EVERY == 0:
                    say(f"  {len(libraries)} libraries and programs read")
    return ImageFacts(libraries, links, packages_of(texts), torch_of(texts), broken, cubins, files, size, manifests)


def may_be_library(file: FoundPath) -> bool:
    """By name and mode: reading the first bytes of every file would take longer than all the rest."""
    name = file.path.rpartition("/")[2]
    return file.size >= 20 and (".so" in name or bool(file.mode & 0o111))
