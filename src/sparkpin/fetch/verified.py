"""Files that were read and found right, known again by their identity: a build need not read 72 GB each time.

Who may write to a file may set its mtime back, but not its ctime: that takes the clock, which is root's. So the file of
the same device, inode, size, mtime and ctime has the bytes that were read. That does not hold against the owner of the
cache, who may write this record, too, nor against a disk that gives other bytes than it was given: for these is --deep.
(tmpfs keeps no ctime of writes through a mapping: a cache in memory trusts those who may write there.)
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sparkpin.checkpoint.copying import link_or_copy
from sparkpin.core import files
from sparkpin.core.errors import CheckpointError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import Say
from sparkpin.fetch.model_files import repository_folder
from sparkpin.fetch.store import missing
from sparkpin.pins.schema import LockedFile, RepositoryLock

TICK = 0.02
"""Seconds. Kernels before 6.13 count ctime in steps of up to 0.01: a change that soon after another leaves no trace."""


class Verified:
    """Of one repository; `save` writes it beside its folder. rows: file -> SHA-256 and identity, when it was read."""

    def __init__(self, paths: Paths, repository: RepositoryLock, *, deep: bool = False) -> None:
        """deep: nothing is known, as if nothing had ever been read."""
        self.folder = repository_folder(paths, repository)
        self.path = self.folder.with_name(f"{self.folder.name}.verified")
        self.rows: dict[str, list[Any]] = {}
        if not deep and self.path.is_file():
            try:
                self.rows = dict(json.loads(self.path.read_text(encoding="utf-8")))
            except (OSError, ValueError, TypeError):  # then all is read again
                self.rows = {}

    def missing(self, wanted: Iterable[LockedFile], say: Say) -> list[LockedFile]:
        """What is absent or damaged, and so not known any more."""
        names = {file.file: file for file in wanted}
        absent = missing(((file, self.folder / name) for name, file in names.items()), say, self.hash_of)
        known = names.keys() - {file.file for file in absent}
        self.rows = {name: row for name, row in self.rows.items() if name in known}
        return absent

    def hash_of(self, file: LockedFile, path: Path) -> str:
        """SHA-256 (hex) of what lies there: the locked one, if that is known; else all is read, and known from then on,
        unless somebody writes to it meanwhile."""
        if self.rows.get(file.file) == [file.sha256, *identity(path)]:
            return file.sha256
        with path.open("rb", buffering=0) as opened:
            if is_young(opened.fileno()):
                time.sleep(TICK)
            before, young = identity(opened.fileno()), is_young(opened.fileno())
            os.fsync(opened.fileno())  # later writes to a mapped page that is dirty would leave no trace in ctime
            sha256 = files.sha256_of(opened)
            if identity(opened.fileno()) == before and not young:
                self.rows[file.file] = [sha256, *before]
        return sha256

    def still(self) -> None:
        """CheckpointError for bytes that have changed since they were known: what was copied meanwhile may be anything.

        Where ctime alone tells of a change, all is read again: it may be a link that was made or removed.
        """
        for file, (sha256, _, _, size, *_) in list(self.rows.items()):
            path = self.folder / file
            if (seen := self.hash_of(LockedFile(name=file, file=file, size=size, sha256=sha256), path)) != sha256:
                changed = f"{path}: saw sha256 {seen}, wanted {sha256}, as it was before the copy"
                raise CheckpointError(changed, next_step="see who writes there, then the same command again")

    def link(self, source: Path, target: Path) -> None:
        """`link_or_copy`, whose link changes the ctime of what was known just before."""
        row, before = self.rows.get(source.relative_to(self.folder).as_posix()), identity(source)
        link_or_copy(source, target)
        if row and row[1:] == before:
            row[1:] = identity(source)

    def save(self, new: Iterable[LockedFile] = ()) -> None:
        """new: what has just arrived in the folder, and was hashed on its way."""
        for file in new:
            self.rows[file.file] = [file.sha256, *identity(self.folder / file.file)]
        files.write_json(self.path, self.rows)


def is_young(file: int) -> bool:
    """A change now might get the ctime that the file has."""
    return time.time() - os.fstat(file).st_ctime < TICK


def identity(file: Path | int) -> list[int]:
    seen = os.stat(file)
    return [seen.st_dev, seen.st_ino, seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns]
