"""Parts of a tar that are written and read without going through all of it."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from sparkpin.core.errors import BuildError
from sparkpin.core.files import CHUNK

BLOCK = tarfile.BLOCKSIZE
END = bytes(2 * BLOCK)
AGAIN = "run the build again"


class Joined(io.RawIOBase):
    """Bytes that come in pieces, of which some may be empty, as a file that can be read once.

    Seeking goes forward only; what is passed over is not copied. So `tarfile` reads an archive as it comes with mode
    "r:" (its stream mode copies a whole buffer for every header).
    """

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self.pieces, self.left, self.at = iter(pieces), memoryview(b""), 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def read(self, size: int = -1) -> bytes:
        """Exactly `size` bytes, fewer at the end only."""
        parts, left = [], size
        while left and (part := self.take(left)):
            parts.append(part)
            left -= len(part)
        return b"".join(parts)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence != io.SEEK_SET or offset < self.at:
            raise io.UnsupportedOperation(f"seek to {offset} from {self.at}: what comes in pieces is read once")
        while self.at < offset and self.take(offset - self.at):
            pass
        return self.at

    def take(self, most: int) -> memoryview:
        """The next bytes as they lie, at most so many (negative: what the piece has); empty at the end."""
        while not self.left:
            piece = next(self.pieces, None)
            if piece is None:
                return self.left
            self.left = memoryview(piece)
        count = len(self.left) if most < 0 else min(most, len(self.left))
        part, self.left = self.left[:count], self.left[count:]
        self.at += count
        return part


class Slice(io.RawIOBase):
    """A read-only window of `size` bytes at `start` of a seekable file."""

    def __init__(self, file: BinaryIO, start: int, size: int) -> None:
        super().__init__()
        self.file, self.start, self.size, self.position = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.size}[whence]
        return self.position

    def tell(self) -> int:
        return self.position

    def readinto(self, view: memoryview | bytearray) -> int:  # type: ignore[override]
        self.file.seek(self.start + self.position)
        count: int = self.file.readinto(memoryview(view)[: max(0, self.size - self.position)])  # type: ignore[attr-defined]
        self.position += count
        return count

    def chunks(self) -> Iterator[bytes]:
        """All of it. BuildError where the file ends before."""
        self.position = 0
        while self.position < self.size:
            if not (chunk := self.read(min(CHUNK, self.size - self.position))):
                raise BuildError(f"got {self.position} bytes of a layer, expected {self.size}", next_step=AGAIN)
            yield chunk


def file_header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """The header of a plain file of root's, as `tarfile` writes it in GNU's form."""
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT)


def padding(size: int) -> bytes:
    return bytes(-size % BLOCK)


def padded(data: bytes) -> bytes:
    return data + padding(len(data))


def batched(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in pieces of CHUNK and more, because a request takes some time for each."""
    batch, size = list[bytes](), 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece)
        if size >= CHUNK:
            yield b"".join(batch)
            batch, size = [], 0
    if size:  # an empty piece would end a request's body
        yield b"".join(batch)
