"""Reads of stated size at stated places of a file that may be cut short or made to mislead."""

from __future__ import annotations

import io
from typing import BinaryIO

from sparkpin.core.errors import InspectionError


class Reader:
    """A seekable file. name: for messages. rows: of linked lists, read so far. Every fault is an InspectionError."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self.file, self.name, self.rows = file, name, 0
        self.size = file.seek(0, io.SEEK_END)

    def at(self, offset: int, size: int, what: str, *, limit: int = 1 << 28) -> bytes:
        """`size` bytes, at most `limit`, at `offset`."""
        if size > limit:
            raise self.wrong(f"{what} of {size} bytes, wanted at most {limit}")
        if offset + size > self.size:
            raise self.wrong(f"{what} at bytes {offset} to {offset + size}, but the file ends at {self.size}")
        self.file.seek(offset)
        data = self.file.read(size)
        if len(data) != size:
            raise self.wrong(f"{what}: read {len(data)} of {size} bytes at {offset}")
        return data

    def wrong(self, text: str) -> InspectionError:
        return InspectionError(f"{self.name}: {text}", next_step="fetch the package again: the file is damaged")
