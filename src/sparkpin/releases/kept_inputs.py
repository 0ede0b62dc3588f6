"""Where the bytes that an image was made from are kept.

What a lock names lies in the store of SPARKPIN_CACHE and can be fetched again, as long as somebody offers it. All else
that an image was made from (texts, tools, wheels of mods, the project's files) nobody else has: it is kept in
SPARKPIN_HOME, so that an old release can be explained, and made again, when the project has moved on.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sparkpin.core.errors import IntegrityError, SparkpinError
from sparkpin.core.files import sha256_file
from sparkpin.core.paths import Paths
from sparkpin.fetch.store import Store
from sparkpin.pins.schema import LockedFile
from sparkpin.releases.record import Release

BRING_BACK = "import a bundle of a release that has it (`invoke import FILE`), or build it again from the same files"


@dataclass(frozen=True)
class KeptInputs:
    """kept: the store of SPARKPIN_HOME; fetched: that of SPARKPIN_CACHE."""

    store: Store
    fetched: Store

    @classmethod
    def of(cls, paths: Paths) -> KeptInputs:
        return cls(Store(paths.inputs, next_step=BRING_BACK), Store(paths.store))

    def holding(self, file: LockedFile) -> Store:
        """The store that has the file, by its size; the fetched one, whose errors say how to get it, when none has."""
        return self.store if self.store.has(file) else self.fetched

    def add(self, source: Path, sha256: str, size: int) -> None:
        """Take a file in, unless it is there and whole. IntegrityError when it is not what it is said to be."""
        file = LockedFile(name=source.name, file="kept", size=size, sha256=sha256)
        if self.has_all([sha256]):
            # Young again for `prune`, should the run be killed before its record is written.
            os.utime(self.store.path(sha256))
        else:
            self.store.add(source, file)

    def read(self, sha256: str, what: str) -> bytes:
        """A kept file's bytes, verified. what: its name for the error."""
        try:
            data = self.store.path(sha256).read_bytes()
        except FileNotFoundError:
            data = b""
        if hashlib.sha256(data).hexdigest() != sha256:
            fault = f"{what} (sha256={sha256}) is missing or damaged in {self.store.root}"
            raise IntegrityError(fault, next_step=BRING_BACK)
        return data

    def has_all(self, wanted: Iterable[str]) -> bool:
        """Whether every one of these SHA-256 is kept and whole. Reads them: project files are small."""
        places = {sha256: self.store.path(sha256) for sha256 in wanted}
        return all(path.is_file() and sha256_file(path)[0] == sha256 for sha256, path in places.items())

    def keep_project(self, project: Path, files: Mapping[str, str]) -> None:
        """Keep files of the project (path -> SHA-256)."""
        for name, sha256 in files.items():
            path = project / name
            self.add(path, sha256, path.stat().st_size)


def reason(error: SparkpinError) -> str:
    """What is wrong with kept files, without the temporary folder that they were laid out in."""
    return re.sub(r"\S*/sparkpin-project-[^/\s]+/", "", error.message)


def read_inputs(paths: Paths, release: Release, below: str = "") -> dict[str, bytes]:
    """The project's files that a release was made from, by path. below: only those of one folder."""
    inputs = KeptInputs.of(paths)
    names = {path: sha256 for path, sha256 in release.inputs.items() if path.startswith(below)}
    return {path: inputs.read(sha256, f"{release.tag}: {path}") for path, sha256 in names.items()}


def lay_out(project: Path, files: Mapping[str, bytes], executable: Collection[str]) -> None:
    for path, content in files.items():
        target = project / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        target.chmod(0o755 if path in executable else 0o644)


@contextlib.contextmanager
def project_of(paths: Paths, release: Release, below: str = "") -> Iterator[Path]:
    """The project as it was when the release was made: a temporary folder with recipe, pins, locks, stages, mods; or
    only with the files below one of its folders."""
    with tempfile.TemporaryDirectory(prefix="sparkpin-project-") as name:
        lay_out(Path(name), read_inputs(paths, release, below), release.executable)
        yield Path(name)
