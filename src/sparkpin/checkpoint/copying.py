"""Copy bytes from file to file at the speed of the disk, in constant memory."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sparkpin.errors import IntegrityError

CHUNK = 1 << 20
STEP = 64 << 20
"""Bytes of one call to the kernel, after which a stop is heeded."""

FICLONE = 0x40049409
"""ioctl of Linux: let a file share the blocks of another one."""

NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS)
NO_COPY_RANGE = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.ETXTBSY, errno.EPERM)


class Run(NamedTuple):
    """Bytes `begin` to `end` of a file."""

    path: Path
    begin: int
    end: int


class Stopped(Exception):
    """Another part of the work failed, or a person stopped it."""


class Files:
    """Opens each file once, for reading; closes them all. For one thread."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

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


class Reader:
    """Reads ranges of files through one buffer. A chunk lives until the next one."""

    def __init__(self) -> None:
        self.files = Files()
        self._buffer = bytearray(CHUNK)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.files.close()

    def chunks(self, path: Path, begin: int, end: int) -> Iterator[memoryview]:
        """Bytes `begin` to `end` of a file. Raises IntegrityError if the file ends before."""
        view = memoryview(self._buffer)
        while begin < end:
            got = os.preadv(self.files[path], [view[: min(CHUNK, end - begin)]], begin)
            if got == 0:
                raise too_short(path, begin, end)
            yield view[:got]
            begin += got


def too_short(path: Path, position: int, end: int) -> IntegrityError:
    return IntegrityError(f"{path}: ends at byte {position}, wanted {end}", next_step="invoke fetch")


class Copier:
    """Appends runs to a file. The kernel copies, where it can: bytes do not pass through this process then, and file
    systems with shared blocks, or far away, may not move them at all. Where it refuses, they are read and written.
    """

    def __init__(self, target: int, stop: threading.Event) -> None:
        self.target, self.stop = target, stop
        self.refused = False

    def copy(self, reader: Reader, run: Run) -> None:
        """Raises IntegrityError if the file ends before the run, OSError, Stopped."""
        position = run.begin
        while position < run.end:
            if self.stop.is_set():
                raise Stopped
            want = min(STEP, run.end - position)
            position += self.step(reader, run, position, want)

    def step(self, reader: Reader, run: Run, position: int, want: int) -> int:
        if not self.refused:
            try:
                copied = os.copy_file_range(reader.files[run.path], self.target, want, position)
                if copied:
                    return copied
            except OSError as error:
                if error.errno not in NO_COPY_RANGE:
                    raise
            # Some kernels give 0 for files that they cannot copy from, as for a file that has ended: reading tells.
            self.refused = True
        for chunk in reader.chunks(run.path, position, position + want):
            write_all(self.target, chunk)
        return want


def write_all(target: int, chunk: bytes | memoryview) -> None:
    view = memoryview(chunk)
    while view:
        view = view[os.write(target, view) :]


def link_or_copy(source: Path, target: Path) -> None:
    """A hard link (the cache's files are read-only and never written in place), else shared blocks, else a copy."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
        return
    except OSError as error:
        if error.errno not in NO_LINK:
            raise
    with Reader() as reader, target.open("wb") as new:
        try:
            fcntl.ioctl(new, FICLONE, reader.files[source])
        except OSError:
            Copier(new.fileno(), threading.Event()).copy(reader, Run(source, 0, source.stat().st_size))
        os.fsync(new.fileno())
