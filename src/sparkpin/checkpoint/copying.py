"""Read ranges of files, gather them in a new one; carry over whole ones by link, by shared blocks, or as a copy."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from sparkpin.core.errors import IntegrityError

CHUNK = 1 << 20
STEP = 64 << 20
"""Bytes that are written between two syncs, after which they leave the page cache."""

FICLONE = 0x40049409
"""ioctl of Linux: let a file share the blocks of another one."""

NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS)


class ByteRange(NamedTuple):
    """Bytes `begin` to `end` of a file."""

    path: Path
    begin: int
    end: int


class RangeReader:
    """Reads ranges of files, each of which it opens once. For one thread."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}

    def __enter__(self) -> RangeReader:
        return self

    def __exit__(self, *exc: object) -> None:
        for file in self._open.values():
            os.close(file)
        self._open.clear()

    def _file(self, path: Path) -> int:
        if path not in self._open:
            if len(self._open) >= 64:  # each tensor of a donor is a file of its own
                self.__exit__()
            self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._open[path]

    def chunks(self, path: Path, begin: int, end: int) -> Iterator[memoryview]:
        """Bytes `begin` to `end` of a file; IntegrityError if it ends before. A chunk lives until the next one."""
        view = memoryview(bytearray(CHUNK))
        while begin < end:
            got = os.preadv(self._file(path), [view[: min(CHUNK, end - begin)]], begin)
            if got == 0:
                step = "invoke build --fetch-only"
                raise IntegrityError(f"{path}: ends at byte {begin}, wanted {end}", next_step=step)
            yield view[:got]
            begin += got


def write_all(target: int, chunk: bytes | memoryview) -> None:
    view = memoryview(chunk)
    while view:
        view = view[os.write(target, view) :]


class GatheringStopped(Exception):
    """Another part of the work failed, or a person stopped it."""


def gather(path: Path, size: int, first: bytes, runs: Iterable[ByteRange], stop: threading.Event) -> str:
    """Write a file of `size` bytes, `first` and then the runs; it is on disk when this returns its SHA-256 (hex).

    Every byte passes through this process once, for its hash. What is on disk leaves the page cache, where it would
    drive out other files: a GPU shares that memory on a Spark. Raises IntegrityError for a source that ends before
    its run or runs that are not `size` long, OSError and GatheringStopped.
    """
    digest, written, clean = hashlib.sha256(first), len(first), 0
    with path.open("wb", buffering=0) as target, RangeReader() as reader:
        write_all(target.fileno(), first)
        for run in runs:
            for chunk in reader.chunks(*run):
                if stop.is_set():
                    raise GatheringStopped
                digest.update(chunk)
                write_all(target.fileno(), chunk)
                written += len(chunk)
                if written - clean >= STEP:
                    os.fdatasync(target.fileno())
                    os.posix_fadvise(target.fileno(), 0, written, os.POSIX_FADV_DONTNEED)
                    clean = written
        if written != size:
            step = "invoke build --fetch-only"
            raise IntegrityError(f"{path}: got {written} bytes, expected {size}", next_step=step)
        os.fsync(target.fileno())
    return digest.hexdigest()


def link_or_copy(source: Path, target: Path) -> None:
    """A hard link (the cache's files are read-only and never written in place), else shared blocks, else a copy."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
        return
    except OSError as error:
        if error.errno not in NO_LINK:
            raise
    with source.open("rb") as old, target.open("wb") as new:
        try:
            fcntl.ioctl(new, FICLONE, old.fileno())
        except OSError:
            shutil.copyfileobj(old, new, CHUNK)
            new.flush()
        os.fchmod(new.fileno(), 0o444)
        os.fsync(new.fileno())
