"""Bring bytes from file to file at the speed of the disk, in constant memory.

`gather` writes new files and hashes what it writes. Every byte passes through this process once, for its hash, and then
goes past the page cache to the disk: that takes a third of the processor time that a copy through the page cache takes
(copy_file_range or cp), leaves nothing to sync, and does not drive other files out of the memory. `link_or_copy`
carries over whole files, which nobody hashes: there the kernel copies.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import mmap
import os
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from sparkpin.errors import IntegrityError

CHUNK = 1 << 20
PIECE, BUFFERS = 4 << 20, 3
"""Bytes of a write past the page cache, and how many of them a file has."""

BLOCK = 4096
"""What offsets, sizes and memory of such a write are multiples of; no disk wants more."""

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
    """Reads ranges of files. For one thread."""

    def __init__(self) -> None:
        self.files = Files()

    def __enter__(self) -> Reader:
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
    return IntegrityError(f"{path}: ends at byte {position}, wanted {end}", next_step="invoke fetch")


def gather(path: Path, size: int, first: bytes, runs: Iterable[Run], stop: threading.Event) -> str:
    """Write a file of `size` bytes, `first` and then the runs; it is on disk when this returns its SHA-256 (hex).

    Memory: BUFFERS pieces. While one is filled and hashed, others are on their way to the disk. Raises IntegrityError
    for a source that ends before its run or runs that are not `size` long, OSError, Stopped.
    """
    digest, offset = hashlib.sha256(), 0
    buffers = [memoryview(mmap.mmap(-1, PIECE)) for _ in range(BUFFERS)]
    pending: deque[Future[None]] = deque()
    with DirectFile(path) as target, Reader() as reader, ThreadPoolExecutor(1, "disk") as disk:
        pieces = filled(itertools.cycle(buffers), first, runs, reader)
        while True:
            if stop.is_set():
                raise Stopped
            if len(pending) == BUFFERS:  # its buffer is the next to be filled
                pending.popleft().result()
            if (piece := next(pieces, None)) is None:
                break
            digest.update(piece)
            pending.append(disk.submit(target.write, piece, offset))
            offset += len(piece)
        for written in pending:
            written.result()
        if offset != size:
            raise IntegrityError(f"{path}: {offset} bytes were gathered, wanted {size}", next_step="invoke fetch")
        target.finish(size)
    return digest.hexdigest()


def filled(
    buffers: Iterator[memoryview], first: bytes, runs: Iterable[Run], reader: Reader
) -> Generator[memoryview, None, None]:
    """The bytes in buffers that are full, but for the last one. A buffer is taken when the next piece is asked for."""
    buffer, position = next(buffers), 0
    for begin in range(0, len(first), PIECE):
        part = first[begin : begin + PIECE]
        if len(part) == PIECE:
            buffer[:] = part
            yield buffer
            buffer = next(buffers)
        else:
            buffer[: len(part)] = part
            position = len(part)
    for run in runs:
        at = run.begin
        while at < run.end:
            got = reader.into(buffer[position : position + run.end - at], run.path, at, run.end)
            at += got
            position += got
            if position == PIECE:
                yield buffer
                buffer, position = next(buffers), 0
    if position:
        yield buffer[:position]


class DirectFile:
    """A new file, written past the page cache where the file system can do that, otherwise through it."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            self.file, self.direct = os.open(path, flags | os.O_DIRECT, 0o644), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.file, self.direct = os.open(path, flags, 0o644), False

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self.file)

    def write(self, piece: memoryview, offset: int) -> None:
        """All of a piece. The file's last block may go out with bytes behind the piece, which `finish` cuts off."""
        whole = -(-len(piece) // BLOCK) * BLOCK
        view = memoryview(piece.obj)[:whole] if self.direct else piece
        while view:
            try:
                written = os.pwrite(self.file, view, offset)
            except OSError as error:
                if error.errno != errno.EINVAL or not self.direct:
                    raise
                self.through_the_cache()
                continue
            view, offset = view[written:], offset + written
            if written % BLOCK and view:
                self.through_the_cache()

    def through_the_cache(self) -> None:
        self.direct = False
        fcntl.fcntl(self.file, fcntl.F_SETFL, fcntl.fcntl(self.file, fcntl.F_GETFL) & ~os.O_DIRECT)

    def finish(self, size: int) -> None:
        os.ftruncate(self.file, size)
        os.fsync(self.file)


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
