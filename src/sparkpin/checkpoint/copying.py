"""Read ranges of files, gather them in a new one; carry over whole ones by link, by shared blocks, or by the kernel."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from sparkpin.core.errors import IntegrityError

CHUNK = 1 << 20
STEP = 64 << 20
"""Bytes of one call to the kernel, so that a person can stop the process."""

FICLONE = 0x40049409
"""ioctl of Linux: let a file share the blocks of another one."""

NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS)
NO_COPY_RANGE = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.ETXTBSY, errno.EPERM)


class ByteRange(NamedTuple):
    """Bytes `begin` to `end` of a file."""

    path: Path
    begin: int
    end: int


class Files:
    """Opens each file once, for reading; closes them all. For one thread."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}

    def close(self) -> None:
        for file in self._open.values():
            os.close(file)
        self._open.clear()

    def __getitem__(self, path: Path) -> int:
        if path not in self._open:
            if len(self._open) >= 64:  # each tensor of a donor is a file of its own
                self.close()
            self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._open[path]


class RangeReader:
    """Reads ranges of files. For one thread."""

    def __init__(self) -> None:
        self.files = Files()

    def __enter__(self) -> RangeReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.files.close()

    def into(self, view: memoryview, path: Path, begin: int, end: int) -> int:
        """Read into a view; gives how many bytes. Raises IntegrityError if the file ends here, before `end`."""
        got = os.preadv(self.files[path], [view], begin)
        if got == 0:
            raise too_short(path, begin, end)
        return got

    def chunks(self, path: Path, begin: int, end: int) -> Iterator[memoryview]:
        """Bytes `begin` to `end` of a file. A chunk lives until the next one."""
        view = memoryview(bytearray(CHUNK))
        while begin < end:
            got = self.into(view[: min(CHUNK, end - begin)], path, begin, end)
            yield view[:got]
            begin += got


def too_short(path: Path, position: int, end: int) -> IntegrityError:
    return IntegrityError(f"{path}: ends at byte {position}, wanted {end}", next_step="invoke build --fetch-only")


def append(target: int, reader: RangeReader, run: ByteRange) -> None:
    """Append a run to a file. The kernel copies, where it can: bytes do not pass through this process then, and file
    systems with shared blocks, or far away, may not move them at all. Where it refuses, they are read and written.

    Raises IntegrityError if the file ends before the run, OSError.
    """
    position = run.begin
    while position < run.end:
        try:
            copied = os.copy_file_range(reader.files[run.path], target, min(STEP, run.end - position), position)
        except OSError as error:
            if error.errno not in NO_COPY_RANGE:
                raise
            copied = 0
        if not copied:  # some kernels give 0 where they cannot copy, as for a file that has ended: reading tells
            for chunk in reader.chunks(run.path, position, run.end):
                write_all(target, chunk)
            return
        position += copied


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
    with RangeReader() as reader, target.open("wb") as new:
        try:
            fcntl.ioctl(new, FICLONE, reader.files[source])
        except OSError:
            append(new.fileno(), reader, ByteRange(source, 0, source.stat().st_size))
        os.fchmod(new.fileno(), 0o444)
        os.fsync(new.fileno())
