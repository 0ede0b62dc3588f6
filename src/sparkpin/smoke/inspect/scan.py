"""All that the rules need to know of an image, gathered in one pass over its files."""

from __future__ import annotations

import fnmatch
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from sparkpin.core.errors import InspectionError
from sparkpin.core.terminal import Say
from sparkpin.smoke.inspect import elf, fatbin
from sparkpin.smoke.inspect.elf import Library
from sparkpin.smoke.inspect.packages import DIST_INFO, SMALL, InstalledPackage, Torch, packages_of, torch_of
from sparkpin.smoke.inspect.tree import FoundPath, real

KERNELS = re.compile(r"(?P<folder>opt/sparkpin/kernels/[^/]+)/(?P<list>kernels\.json$)?")  # mods/modkit writes it
TEXTS = re.compile(
    rf"{DIST_INFO.pattern}|opt/sparkpin/kernels/[^/]+/kernels\.json"
    r"|(.*/)?torch/version\.py|(.*/)?sparkpin_\w+/.*\.py|etc/ld\.so\.conf(\.d/.*)?"
)
CONF = "etc/ld.so.conf"
EVERY = 100  # libraries between two lines of progress


@dataclass(frozen=True)
class ImageFacts:
    libraries: Mapping[str, Library]  # by path, links followed
    links: Mapping[str, str]  # path -> target
    packages: tuple[InstalledPackage, ...] = ()
    torch: Torch | None = None
    broken: Mapping[str, str] = field(default_factory=dict)  # path -> what is wrong with the file
    # Folder of a mod's kernels -> how many .cubin files lie in it for which GPU.
    cubins: Mapping[str, tuple[tuple[fatbin.Code, int], ...]] = field(default_factory=dict)
    searched: tuple[str, ...] = ()  # folders of the loader's configuration
    env: Mapping[str, str] = field(default_factory=dict)
    files: int = 0
    size: int = 0  # bytes
    manifests: Mapping[str, str] = field(default_factory=dict)  # folder of a mod's kernels -> the list of them

    def real(self, path: str) -> str:
        return real(path, self.links)

    def package(self, name: str) -> InstalledPackage | None:
        return next((package for package in self.packages if package.name == name), None)


def scan(found: Iterable[FoundPath], say: Say, env: Mapping[str, str] | None = None) -> ImageFacts:
    libraries: dict[str, Library] = {}
    links: dict[str, str] = {}
    texts: dict[str, str] = {}
    broken: dict[str, str] = {}
    cubins: dict[str, Counter[fatbin.Code]] = {}
    files = size = 0
    for file in found:
        if file.link:
            links[file.path] = file.link
            continue
        files, size = files + 1, size + file.size
        if TEXTS.fullmatch(file.path) and file.size <= SMALL:
            with file.open() as source:
                texts[file.path] = source.read().decode("utf-8", "replace")
        elif may_be_library(file):
            try:
                with file.open() as source:
                    library = elf.read_library(source, file.path) if source.read(4) == elf.MAGIC else None
            except InspectionError as error:
                broken[file.path] = error.message
                continue
            if library and file.path.endswith(".cubin") and (kernels := KERNELS.match(file.path)):
                found_code = [code for unit, _ in library.code for code in unit]
                cubins.setdefault(kernels["folder"], Counter()).update(found_code)
            elif library:
                libraries[file.path] = library
                if len(libraries) % EVERY == 0:
                    say(f"  {len(libraries)} libraries and programs read")
    return ImageFacts(
        libraries,
        links,
        packages_of(texts),
        torch_of(texts),
        broken,
        {folder: tuple(sorted(codes.items())) for folder, codes in cubins.items()},
        tuple(configured(texts, CONF)),
        env or {},
        files,
        size,
        {match["folder"]: text for path, text in texts.items() if (match := KERNELS.match(path)) and match["list"]},
    )


def may_be_library(file: FoundPath) -> bool:
    """By name and mode: reading the first bytes of every file would take longer than all the rest."""
    name = file.path.rpartition("/")[2]
    is_kernel = name.endswith(".cubin") and bool(KERNELS.match(file.path))
    return file.size >= 20 and (".so" in name or is_kernel or bool(file.mode & 0o111))


def configured(texts: Mapping[str, str], path: str, depth: int = 0) -> Iterator[str]:
    """Folders of ld.so.conf and of what it includes."""
    for line in texts.get(path, "").splitlines() if depth < 8 else ():
        words = line.partition("#")[0].split()
        if words[:1] == ["include"]:
            for pattern in words[1:]:
                pattern = posixpath.normpath(posixpath.join("/", posixpath.dirname(path), pattern)).lstrip("/")
                for name in sorted(texts):
                    if fnmatch.fnmatchcase(name, pattern):
                        yield from configured(texts, name, depth + 1)
        elif words:
            yield words[0]
