"""Which large files are still those that were hashed; and whether a finished checkpoint is what its record names.

A file with the device, inode, size, mtime and ctime that it had when it was hashed has the same bytes: whoever may
write to it may set its mtime back, but not its ctime, which takes the clock, and so root. That does not protect against
the owner of the table, nor against a disk that returns other bytes: for these is --deep. (Kernels before 6.13 count
ctime in steps of 10 ms: a file is not written and hashed within one by different programs. tmpfs keeps no ctime of
writes through a mapping: a cache in memory trusts those who may write there.)
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sparkpin.core import files
from sparkpin.core.errors import CheckpointError
from sparkpin.core.paths import Paths

RECORD = "sparkpin.json"
"""How a checkpoint was made. Written last."""

TABLE = ".hashed.json"
"""The table of `Hashes`, in the cache."""

OWN = (RECORD, TABLE)
"""Files of a checkpoint that are not the model's. A base that has such a file, as a checkpoint of ours that was
published has, does not lend it: it would describe another checkpoint."""

REBUILD = "delete this folder and run `invoke build --checkpoint-only` with the same options, which builds it again"
SMALL = 32 << 20
"""Bytes up to which a file is hashed at every look: config, tokenizer, chat template, index."""


class Hashes:
    """Files that were hashed. rows: path from the table's folder -> identity and SHA-256.

    Threads may share one. `save` adds what is new to the table's file; runs at once lose nothing of each other.
    """

    def __init__(self, path: Path, lock: Path | None = None, *, deep: bool = False) -> None:
        """lock: where several runs may save. deep: ignore what earlier runs hashed."""
        self.path, self.rows, self.new = path, {} if deep else read_table(path), dict[str, list[Any]]()
        self.lock = lock
        self.guard = threading.Lock()

    @classmethod
    def here(cls, paths: Paths, *, deep: bool = False) -> Hashes:
        """The table of this machine."""
        return cls(paths.cache / TABLE, paths.locks / "hashed.lock", deep=deep)

    def name(self, path: Path) -> str:
        return os.path.relpath(path, self.path.parent)

    def known(self, path: Path) -> str | None:
        """SHA-256 (hex) of a file that has not changed since it was hashed."""
        *then, sha256 = self.rows.get(self.name(path), [None])
        return sha256 if then == identity(path) else None

    def was_written(self, path: Path) -> bool:
        """Whether the file was hashed, and inode, size or mtime have changed: a new link changes its ctime alone."""
        row = self.rows.get(self.name(path))
        return row is not None and row[:3] != identity(path)[:3]

    def sha256(self, path: Path) -> str:
        """SHA-256 (hex): the known one; otherwise the file is read, and known from then on unless somebody writes to it
        meanwhile."""
        if known := self.known(path):
            return known
        with path.open("rb", buffering=0) as file:
            before = identity(file.fileno())
            os.fsync(file.fileno())  # later writes to a mapped page that is dirty would leave no trace in ctime
            sha256 = files.sha256_of(file)
            if identity(file.fileno()) == before:
                self.note(path, sha256)
        return sha256

    def note(self, path: Path, sha256: str) -> None:
        """The file has just been written or hashed."""
        with self.guard:
            self.rows[self.name(path)] = self.new[self.name(path)] = [*identity(path), sha256]

    def link(self, link: Callable[[Path, Path], None], source: Path, target: Path) -> None:
        """Carry out `link`. Of a known file it changes the ctime, for all its names."""
        known, before = self.known(source), identity(source)
        link(source, target)
        if known:
            row = [*identity(source), known]
            with self.guard:
                self.new |= {name: row for name, old in self.rows.items() if old == [*before, known]}
                self.rows |= self.new
            self.note(target, known)

    def save(self) -> None:
        with self.guard:
            if self.new:
                with files.lock(self.lock) if self.lock else contextlib.nullcontext():
                    rows = read_table(self.path) | self.new
                    there = {name: row for name, row in rows.items() if (self.path.parent / name).exists()}
                    files.write_json(self.path, there)
                self.new = {}


def read_table(path: Path) -> dict[str, list[Any]]:
    """Empty where there is none, or a damaged one: then all is hashed again."""
    try:
        return {str(name): list(row) for name, row in json.loads(path.read_bytes()).items() if row}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def identity(file: Path | int) -> list[Any]:
    found = os.stat(file)
    return [f"{found.st_dev}:{found.st_ino}", found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def is_complete(folder: Path, key: str) -> bool:
    """Cheap: the record is of this key and names every file with the size that it has. Bytes: `check_content`."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        sizes = {p.relative_to(folder).as_posix(): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
        recorded = {name: row["size"] for name, row in record["files"].items()}
        return bool(record["key"] == key and {n: s for n, s in sizes.items() if n not in OWN} == recorded)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def check_content(
    folder: Path, hashes: Hashes, hashing: Callable[[Path], object] | None = None, *, deep: bool = False
) -> list[Path]:
    """The files that were hashed; the caller saves `hashes`. CheckpointError for the first that is not as recorded,
    of a folder that `is_complete`.

    hashing: gets each large file that is about to be hashed; None: a large file that was never hashed, or that may have
    got another link since, waits for a `promote`.
    deep: hash every file.
    """
    hashed = []
    for name, row in json.loads((folder / RECORD).read_bytes())["files"].items():
        path, expected = folder / name, row.get("sha256")
        if not isinstance(expected, str):
            raise bad(folder / RECORD, f"files[{name!r}].sha256: got {expected!r}, expected the SHA-256 of that file")
        got = None if deep else hashes.known(path)
        if got is None:
            is_large = row["size"] > SMALL
            if is_large and not hashing and not hashes.was_written(path):
                continue
            if is_large and hashing:
                hashing(path)
            got = files.sha256_file(path)[0] if deep else hashes.sha256(path)
            hashed.append(path)
        if got != expected:
            raise bad(path, f"got SHA-256 {got}, expected {expected} as in {RECORD}")
    return hashed


def bad(path: Path, cause: str) -> CheckpointError:
    return CheckpointError(f"{path}: {cause}", next_step=REBUILD)
