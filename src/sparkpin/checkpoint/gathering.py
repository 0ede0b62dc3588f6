"""Gather ranges of files in a new one, at the speed of the disk, in constant memory.

Every byte passes through this process once, for its hash, and then goes past the page cache to the disk. That takes a
third of the processor time of a copy through the page cache (copy_file_range or cp), leaves nothing to sync, and does
not drive other files out of the memory.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import mmap
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from sparkpin.checkpoint.copying import ByteRange, RangeReader
from sparkpin.core.errors import IntegrityError

STEP = 256 << 10
"""Bytes that are read and hashed at once: they stay in the processor's nearest caches in between."""

AHEAD = 4 << 20
"""Bytes that the disk is asked for before they are needed; what the kernel does by itself is too little for several
files that are read at once while others are written."""

PIECE, BUFFERS, WRITES = 1 << 20, 6, 2
"""Bytes of a write past the page cache, how many pieces a file has in memory, and how many of them go out at once."""

BLOCK = 4096
"""What offsets, sizes and memory of such a write are multiples of; no disk wants more."""


FALLOCATE = ctypes.CDLL(None, use_errno=True).fallocate
FALLOCATE.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class GatheringStopped(Exception):
    """Another part of the work failed, or a person stopped it."""


def gather(
    path: Path, size: int, first: bytes, runs: Iterable[ByteRange | Iterator[memoryview]], stop: threading.Event
) -> str:
    """Write a file of `size` bytes, `first` and then the runs; it is on disk when this returns its SHA-256 (hex).

    A run lies in a file, or comes in chunks. Raises IntegrityError for a source that ends before its run or runs that
    are not `size` long, OSError, Stopped, and what computing a chunk raises.
    """
    digest = hashlib.sha256(first)
    with DirectFile(path, size) as target, Pieces(target) as pieces, RangeReader() as reader:
        pieces.put(memoryview(first))
        for run in runs:
            if not isinstance(run, ByteRange):
                for chunk in run:
                    if stop.is_set():
                        raise GatheringStopped
                    digest.update(chunk)
                    pieces.put(chunk)
                continue
            at = asked = run.begin
            while at < run.end:
                if stop.is_set():
                    raise GatheringStopped
                while asked < min(at + AHEAD, run.end):
                    reader.ask(run.path, asked, PIECE)
                    asked += PIECE
                room = pieces.room(min(STEP, run.end - at))
                got = reader.into(room, run.path, at, run.end)
                digest.update(room[:got])
                at += pieces.fill(got)
        pieces.flush()
        if pieces.offset != size:
            raise IntegrityError(
                f"{path}: {pieces.offset} bytes were gathered, wanted {size}", next_step="invoke build --fetch-only"
            )
        target.finish(size)
    return digest.hexdigest()


class Pieces:
    """Memory in pieces: while one is filled, others are on their way to the disk."""

    def __init__(self, target: DirectFile) -> None:
        self.target, self.offset, self.filled = target, 0, 0
        self.buffers = deque(memoryview(mmap.mmap(-1, PIECE)) for _ in range(BUFFERS))
        self.pending: deque[Future[None]] = deque()
        self.disk = ThreadPoolExecutor(WRITES, "disk")

    def __enter__(self) -> Pieces:
        return self

    def __exit__(self, *exc: object) -> None:
        self.disk.shutdown(wait=True, cancel_futures=True)

    def room(self, most: int) -> memoryview:
        """Where the next bytes go: at most so many, at least one."""
        return self.buffers[0][self.filled : self.filled + most]

    def fill(self, count: int) -> int:
        """So many bytes of the room are filled."""
        self.filled += count
        if self.filled == PIECE:
            self.send()
        return count

    def put(self, rest: memoryview) -> None:
        """Copy bytes from elsewhere."""
        while rest:
            room = self.room(len(rest))
            room[:] = rest[: len(room)]
            rest = rest[self.fill(len(room)) :]

    def send(self) -> None:
        piece = self.buffers[0][: self.filled]
        self.pending.append(self.disk.submit(self.target.write, piece, self.offset))
        self.offset, self.filled = self.offset + len(piece), 0
        self.buffers.rotate(-1)
        if len(self.pending) == BUFFERS:  # the buffer that is the next to be filled is on its way
            self.pending.popleft().result()

    def flush(self) -> None:
        """All is written. Raises what writing raises."""
        if self.filled:
            self.send()
        for written in self.pending:
            written.result()


def reserve(file: int, size: int) -> None:
    """Set blocks aside, where the file system can do that. Raises OSError if there are not so many.

    Not by os.posix_fallocate: where the kernel refuses, as over NFS before 4.2, glibc writes a byte into each block
    instead, which takes longer than the data.
    """
    while FALLOCATE(file, 0, 0, size) != 0:
        code = ctypes.get_errno()
        if code in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            return
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


class DirectFile:
    """A new file, written past the page cache where the file system can do that, otherwise through it."""

    def __init__(self, path: Path, size: int) -> None:
        """Raises OSError; a full disk is told here, where the file system can set blocks aside."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            self.file, self.direct = os.open(path, flags | os.O_DIRECT, 0o644), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.file, self.direct = os.open(path, flags, 0o644), False
        if self.direct and size:  # writes inside a file need not wait for each other, those that extend it do
            try:
                reserve(self.file, size)
            except OSError:
                os.close(self.file)
                raise

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
