"""What the loader would do: which file each needed library is, which symbols and versions nothing offers."""

from __future__ import annotations

import itertools
import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

from sparkpin.smoke.inspect.elf import Library
from sparkpin.smoke.inspect.finding import Allowed, ImageFinding, Severity, reason
from sparkpin.smoke.inspect.scan import ImageFacts

# Loaded by Python before what needs them: a library of that name is in memory by then, wherever it lies.
LOADED_FIRST = ("/torch/lib/", "/nvidia/")
SHOWN = 4
LINKS = 8  # of one name to another
PUT_IN = "put the package with {} into the stack's pins, or leave out what needs it"
ONE_RELEASE = "take builds of one release: this library was built against another one of those it needs"
OLDER_SYSTEM = "take a build for an older system, or a newer Debian suite in the stack's pins"
TORCH = re.compile(r"^_ZN?K?(3c10|2at|5torch)|^(aoti_)?torch_")  # told first: what people meet


class Linker:
    """The libraries of an image by the names that others need them by. allowed: see `finding`.

    Whatever of that name lies in the image counts, on a search path or not: Python loads by path what is in memory when
    another library needs it, and the load in a container asks the image's own loader.
    """

    def __init__(self, facts: ImageFacts, allowed: Sequence[Allowed]) -> None:
        self.facts, self.allowed = facts, allowed
        self.links = {posixpath.basename(path): posixpath.basename(target) for path, target in facts.links.items()}
        self.names: dict[tuple[int, str], list[str]] = {}
        for path, library in sorted(facts.libraries.items()):
            for name in {posixpath.basename(path), library.soname} - {""} if library.dynamic else ():
                self.names.setdefault((library.machine, name), []).append(path)
        self.resolved: dict[tuple[str, str], str] = {}
        self.closures: dict[str, tuple[Library, ...]] = {}

    def find(self, library: Library, name: str) -> str:
        """The path of what a library needs; "" when the image has none. Of several the nearest, and those first that
        are loaded before others."""
        if (library.path, name) not in self.resolved:
            name_there = posixpath.basename(name)
            for _ in range(LINKS):
                if (library.machine, name_there) not in self.names:
                    name_there = self.links.get(name_there, "")
            places = self.names.get((library.machine, name_there), [])
            first = [path for part in LOADED_FIRST for path in places if part in f"/{path}"] + places
            near = max(first, key=lambda path: len(shared_folders(path, library.path)), default="")
            self.resolved[library.path, name] = near
        return self.resolved[library.path, name]

    def closure(self, library: Library) -> tuple[Library, ...]:
        """The library and all that it needs, in the order of loading."""
        if library.path not in self.closures:
            found = {library.path: library}
            waiting = [library]
            for one in waiting:
                for name in one.needed:
                    path = self.find(one, name)
                    if path and path not in found:
                        found[path] = self.facts.libraries[path]
                        waiting.append(found[path])
            self.closures[library.path] = tuple(found.values())
        return self.closures[library.path]

    @cached_property
    def interpreter(self) -> tuple[Library, ...]:
        """Python and what it needs: their symbols are there for every extension module."""
        for library in self.facts.libraries.values():
            name = library.path.rpartition("/")[2]
            if name.startswith(("python3", "libpython3")) and b"Py_Initialize" in library.defined:
                return self.closure(library)
        return ()

    def findings(self) -> Iterator[ImageFinding]:
        yield from self.missing()
        for library in self.facts.libraries.values():
            if library.dynamic:
                yield from self.unresolved(library)
                yield from self.versions(library)

    def missing(self) -> Iterator[ImageFinding]:
        """Needed libraries that the image does not have, one finding for each name and reason."""
        users: dict[tuple[str, str], list[str]] = {}
        for library in self.facts.libraries.values():
            for name in library.needed:
                if not self.find(library, name):
                    why = reason(self.allowed, "needed", library.path, name)
                    users.setdefault((name, why), []).append(library.path)
        for (name, why), paths in sorted(users.items()):
            text = f"{name} is nowhere in the image; {some(paths)} {'needs' if len(paths) == 1 else 'need'} it"
            step = "" if why else PUT_IN.format(name)
            yield ImageFinding("allowed" if why else "error", "needed", paths[0], text, step, what=name, why=why)

    def unresolved(self, library: Library) -> Iterator[ImageFinding]:
        """Strong symbols that nothing which is loaded with the library defines.

        Python loads with RTLD_NOW: each of them is the end of the import.
        """
        left = self.beyond(library.undefined, self.closure(library))
        if left and (loaders := self.loaders.get(library.path)):
            # Never loaded alone: what loads it may bring the symbols. NVPL's LAPACK takes either of two BLAS that way.
            left = frozenset().union(*(self.beyond(left, self.closure(loader)) for loader in loaders))
        by_reason: dict[str, list[str]] = {}
        for symbol in sorted(left, key=lambda name: (not TORCH.search(name.decode("utf-8", "replace")), name)):
            name = symbol.decode("utf-8", "replace")
            why = reason(self.allowed, "symbols", library.path, name)
            by_reason.setdefault(why, []).append(name)
        for why, names in sorted(by_reason.items()):
            severity: Severity = "allowed" if why else "error"
            step = "" if why else ONE_RELEASE
            text = f"{len(names)} undefined: {some(names)}"
            yield ImageFinding(severity, "symbols", library.path, text, step, what=names[0], why=why)

    def beyond(self, symbols: frozenset[bytes], loaded: Iterable[Library]) -> frozenset[bytes]:
        """Those that neither the loaded libraries define nor Python."""
        for other in (*loaded, *self.interpreter):
            if not symbols:
                break
            symbols = symbols - other.defined
        return symbols

    @cached_property
    def loaders(self) -> dict[str, list[Library]]:
        """Of each library that others need: those of them that nothing else needs."""
        needed = {self.find(library, name) for library in self.facts.libraries.values() for name in library.needed}
        found: dict[str, list[Library]] = {}
        for library in self.facts.libraries.values():
            if library.dynamic and library.path not in needed:
                for one in self.closure(library)[1:]:
                    found.setdefault(one.path, []).append(library)
        return found

    def versions(self, library: Library) -> Iterator[ImageFinding]:
        """Versions ("GLIBC_2.38") that are wanted of a library which does not offer them."""
        for name, wanted in library.versions_needed.items():
            path = self.find(library, name)
            there = self.facts.libraries.get(path)
            if there and there.versions and (lacking := sorted(wanted - there.versions)):
                text = f"needs {some(lacking)} of {name}, and {path} does not offer that"
                yield ImageFinding("error", "versions", library.path, text, OLDER_SYSTEM, what=lacking[-1])


def some(names: Iterable[str]) -> str:
    """The first few."""
    names = list(names)
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def shared_folders(one: str, other: str) -> list[str]:
    pairs = zip(one.split("/")[:-1], other.split("/")[:-1], strict=False)
    return [left for left, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
