"""A piece of a remote file: what it is, how it grows on disk, which go together in one request."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from sparkpin.core import files
from sparkpin.core.errors import IntegrityError
from sparkpin.fetch.origins import FileOrigin

SPAN = 64 << 20
"""Bytes after which pieces are no longer joined to one request, so that there is work for all connections."""
GAPS = 0.005
"""Bytes between pieces that are fetched and thrown away to save requests, at most, as a share of the pieces' bytes."""


@dataclass(frozen=True, eq=False, slots=True)
class FilePiece:
    """Bytes `begin` to `end` of a file of `size` bytes.

    what: for messages; part: where it grows, of no other piece; place: SHA-256 -> where it lies in the end, on the disk
    of `part`; sha256: the one that it must have, "" where it is not known yet; git: git's blob hash that the whole file
    must have, or "".
    """

    origin: FileOrigin
    file: str
    size: int
    begin: int
    end: int
    what: str
    part: Path
    place: Callable[[str], Path]
    sha256: str = ""
    git: str = ""
    mode: int = 0o444  # checkpoints hold hard links to whole files, so nothing may write into them

    @property
    def length(self) -> int:
        return self.end - self.begin

    @property
    def label(self) -> str:
        return f"{self.what} of {self.origin.name}"


def joined(pieces: Iterable[FilePiece]) -> list[list[FilePiece]]:
    """Pieces of one file that lie one behind the other, or nearly so, as one request. Largest first.

    One that an earlier run has begun stands at the head of its request, so that only its rest is asked for.
    """
    rows = sorted(pieces, key=lambda piece: (piece.origin.name, piece.file, piece.begin, piece.end))
    pairs = [(a, b) for a, b in itertools.pairwise(rows) if can_follow(a, b)]
    budget = GAPS * sum(piece.length for piece in rows)
    bridged: set[FilePiece] = set()
    for left, right in sorted(pairs, key=lambda pair: pair[1].begin - pair[0].end):
        budget -= right.begin - left.end
        if budget < 0:
            break
        bridged.add(right)
    spans: list[list[FilePiece]] = []
    for piece in rows:
        if piece in bridged and piece.end - spans[-1][0].begin <= SPAN:
            spans[-1].append(piece)
        else:
            spans.append([piece])
    return sorted(spans, key=lambda span: span[0].begin - span[-1].end)


def can_follow(left: FilePiece, right: FilePiece) -> bool:
    same = left.origin is right.origin and left.file == right.file
    behind = right.begin == left.end or (right.begin > left.end and right.length > 0)
    return same and behind and not right.part.exists()


class Growing:
    """A piece's file while it grows, and the hashes of what it holds."""

    def __init__(self, piece: FilePiece, *, fresh: bool) -> None:
        self.piece, self.size = piece, 0
        self.sha256 = hashlib.sha256()
        self.git = hashlib.sha1(b"blob %d\0" % piece.length, usedforsecurity=False) if piece.git else None
        with files.disk_errors(piece.part.parent):
            piece.part.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                piece.part.chmod(0o644)  # a run that was killed in `keep` left it read-only
            self.file = piece.part.open("wb+" if fresh else "ab+", buffering=0)
            if self.file.seek(0, os.SEEK_END) > piece.length:
                self.file.truncate(0)
            self.file.seek(0)
            while chunk := self.file.read(files.CHUNK):
                self.count(memoryview(chunk))

    def count(self, data: memoryview) -> None:
        self.sha256.update(data)
        if self.git:
            self.git.update(data)
        self.size += len(data)

    def write(self, data: memoryview) -> None:
        with files.disk_errors(self.piece.part.parent):
            while data:
                written = self.file.write(data)
                self.count(data[:written])
                data = data[written:]

    @property
    def is_right(self) -> bool:
        """Whether the whole piece is what it must be."""
        own = self.sha256.hexdigest(), self.git.hexdigest() if self.git else ""
        return own == (self.piece.sha256 or own[0], self.piece.git)

    def mismatch(self, advice: str) -> IntegrityError:
        piece = self.piece
        return IntegrityError.mismatch(
            piece.label,
            expected_size=piece.length,
            expected_sha256=piece.sha256 or f"(that of git blob {piece.git})",
            size=piece.length,
            sha256=self.sha256.hexdigest(),
            next_step=advice,
        )

    def keep(self, target: Path) -> None:
        with self.file, files.disk_errors(target.parent):
            target.parent.mkdir(parents=True, exist_ok=True)
            os.fchmod(self.file.fileno(), self.piece.mode)
            os.fsync(self.file.fileno())
            self.piece.part.replace(target)
            files.sync_folder(target.parent)

    def close(self) -> None:
        self.file.close()

    def discard(self) -> None:
        self.close()
        self.piece.part.unlink()
