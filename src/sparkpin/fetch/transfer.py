"""Pieces of files: several at once, verified by hash, resumed after a cut or a kill.

A piece grows in a file of its own, `Piece.part`, and moves to its place by one rename, when it is complete and its hash
is right. What a cut, a kill or a full disk leaves of it stays, and only the rest is requested.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from sparkpin.core import files, terminal
from sparkpin.core.errors import IntegrityError
from sparkpin.core.terminal import Say
from sparkpin.fetch.hub import TRIES, Source, Temporary, TransferStopped, is_whole, patient, pause

CONNECTIONS = 8
PROGRESS_SECONDS = 5.0


@dataclass(frozen=True, eq=False, slots=True)
class Piece:
    """Bytes `begin` to `end` of a file of `size` bytes.

    part: where it grows, used by no other piece; target: where it ends, on the same disk; sha256: the locked one, or ""
    while no lock has one; git: the blob hash that git has for the complete file, or "".
    """

    source: Source
    file: str
    size: int
    begin: int
    end: int
    part: Path
    target: Path
    sha256: str = ""
    git: str = ""

    @property
    def length(self) -> int:
        return self.end - self.begin

    @property
    def label(self) -> str:
        span = "" if self.length == self.size else f"bytes {self.begin}-{self.end - 1} of "
        return f"{span}{self.file} of {self.source.name}"

    @property
    def present(self) -> int:
        """Bytes that are on the disk."""
        return min(self.length, sum(path.stat().st_size for path in (self.part, self.target) if path.is_file()))

    def is_here(self) -> bool:
        """Whether the target is there and right. Without a hash only what a killed run brought is believed."""
        is_known = self.sha256 or self.git or self.target.parent == self.part.parent
        return bool(is_known) and is_whole(self.target, self.length) and self.is_right(self.target)

    def is_right(self, path: Path) -> bool:
        if self.git and files.git_blob_sha1(path.read_bytes()) != self.git:
            return False
        return not self.sha256 or files.sha256_file(path)[0] == self.sha256

    def settle(self, next_step: str) -> None:
        """Move the complete part to its place, or remove it and raise IntegrityError.

        It is read once more for that, so that its first bytes, of an earlier run, are hashed as well as its last: after
        a loss of power a file can have the right length and wrong bytes.
        """
        if not self.is_right(self.part):
            sha256, size = files.sha256_file(self.part)
            self.part.unlink()
            expected = self.sha256 or f"(that of git blob {self.git})"
            raise IntegrityError.mismatch(
                self.label, expected_size=size, expected_sha256=expected, size=size, sha256=sha256, next_step=next_step
            )
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self.part.chmod(0o444)  # checkpoints have hard links to such files, so nothing may write into them
        files.sync_file(self.part)
        self.part.replace(self.target)
        files.sync_folder(self.target.parent)


def fetch(pieces: Sequence[Piece], say: Say, *, title: str, advice: str) -> None:
    """Bring every piece to its place, verified; if one fails, those that are on their way are broken off and kept.

    advice: the next step for bytes that are wrong twice. Raises NetworkError, IntegrityError, DiskError.
    """
    stop, begun = threading.Event(), time.monotonic()
    total, before = sum(piece.length for piece in pieces), sum(piece.present for piece in pieces)
    # Largest first, or one connection would have the last large one to itself.
    ordered = sorted(pieces, key=lambda piece: -piece.length)
    with ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="fetch") as pool:
        jobs = [pool.submit(bring, piece, say, advice, stop) for piece in ordered]
        try:
            left = set(jobs)
            while left:
                done, left = wait(left, timeout=PROGRESS_SECONDS, return_when=FIRST_EXCEPTION)
                if any(job.exception() for job in done):
                    stop.set()
                elif left:
                    present = sum(piece.present for piece in pieces)
                    rate = (present - before) / (time.monotonic() - begun)
                    rest = f"{terminal.duration((total - present) / rate)} left" if rate > 0 else "nothing arrives"
                    sizes = [terminal.size(round(value)) for value in (present, total, rate)]
                    say(f"{title}: {sizes[0]} of {sizes[1]}, {sizes[2]}/s, {rest}")
        except BaseException:
            stop.set()
            raise
    for job in jobs:
        if (error := job.exception()) and not isinstance(error, TransferStopped):
            raise error


def bring(piece: Piece, say: Say, advice: str, stop: threading.Event) -> None:
    """Bring one piece to its place. Bytes that are wrong are requested once more."""

    def receive(again: bool) -> None:
        with piece.part.open("ab") as file:
            begin = piece.begin + file.tell()
            if begin < piece.end:
                with piece.source.open(piece.file, begin, piece.end, piece.size, again=again) as chunks:
                    for chunk in chunks:
                        pause(stop, 0)
                        file.write(chunk[: piece.length - file.tell()])
                        file.flush()  # a kill loses no byte
                        if file.tell() == piece.length:
                            return
                raise Temporary(f"the connection broke after {file.tell():,} of {piece.length:,} bytes")

    with files.disk_errors(piece.part.parent):
        piece.part.parent.mkdir(parents=True, exist_ok=True)
        if piece.part.exists():
            piece.part.chmod(0o644)  # a run that was killed in `settle` left it read-only
            if piece.part.stat().st_size > piece.length or not (piece.sha256 or piece.git):
                piece.part.unlink()  # no hash would show whether it is right
        for again in (False, True):
            ask = functools.partial(receive, again)
            patient(ask, piece.label, say, tries=TRIES, stop=stop, at=lambda: piece.present)
            try:
                return piece.settle(piece.source.next_step or advice)
            except IntegrityError:
                if again:
                    raise
            say(f"{piece.label} arrived with wrong bytes: asking for it once more")
