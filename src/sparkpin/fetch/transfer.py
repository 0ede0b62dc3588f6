"""Pieces of remote files, fetched by byte ranges: several at once, verified, resumed after a cut or a kill.

A piece grows in a file of its own, `Piece.part`, and moves to its place when it is whole and its hash is right. What a
cut, a kill or a full disk leaves of it is read and hashed again, and only the rest is asked for.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from sparkpin.core.terminal import Say
from sparkpin.fetch.origins import FolderOrigin, Temporary, patient
from sparkpin.fetch.pieces import FilePiece, Growing, joined

CONNECTIONS = 8
PROGRESS_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Fetched:
    """sha256: of each piece, in the order of asking; received: bytes that came over the wire."""

    sha256: tuple[str, ...]
    received: int


def fetch(pieces: Sequence[FilePiece], say: Say, *, title: str, advice: str) -> Fetched:
    """Every piece at its place, whole and right; the first failure is raised when all transfers have ended.

    advice: the next step for bytes that are wrong twice. Raises NetworkError, IntegrityError, DiskError.
    """
    return TransferRun(say, title, advice, sum(piece.length for piece in pieces)).all(pieces)


class TransferStopped(Exception):
    """Another transfer failed, or a person stopped the run."""


class TransferRun:
    """One call of `fetch`. received: bytes that came, `local` of them from a folder; there: bytes of the pieces."""

    def __init__(self, say: Say, title: str, advice: str, total: int) -> None:
        self.say, self.title, self.advice, self.total = say, title, advice, total
        self.received = self.there = self.local = 0
        self.done: dict[FilePiece, str] = {}
        self.lock, self.stop = threading.Lock(), threading.Event()

    def all(self, pieces: Sequence[FilePiece]) -> Fetched:
        begun = told = time.monotonic()
        failure: BaseException | None = None
        with ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="fetch") as pool:
            left: set[Future[None]] = {pool.submit(Transfer(self, span).run) for span in joined(pieces)}
            try:
                while left:
                    ended, left = wait(left, timeout=PROGRESS_SECONDS, return_when=FIRST_COMPLETED)
                    errors = [future.exception() for future in ended]
                    failure = failure or next((e for e in errors if e and not isinstance(e, TransferStopped)), None)
                    if failure:
                        self.stop.set()  # those that wait for a connection end as they begin: `wait` knows no other end
                    if left and time.monotonic() - told >= PROGRESS_SECONDS:
                        told = time.monotonic()
                        self.say(self.progress(told - begun))
            except BaseException:
                self.stop.set()
                raise
        if failure:
            raise failure
        return Fetched(tuple(self.done[piece] for piece in pieces), self.received - self.local)

    def progress(self, seconds: float) -> str:
        rate = self.received / seconds
        return (
            f"{self.title}: {self.there / 1e6:,.1f} of {self.total / 1e6:,.1f} MB, {rate / 1e6:,.1f} MB/s, "
            f"{duration((self.total - self.there) / rate) if rate else 'who knows how long'} left"
        )

    def count(self, *, received: int = 0, there: int = 0, local: bool = False) -> None:
        with self.lock:
            self.received += received
            self.local += received if local else 0
            self.there += there

    def pause(self, seconds: float) -> None:
        self.stop.wait(seconds)
        self.go_on()

    def go_on(self) -> None:
        if self.stop.is_set():
            raise TransferStopped


class Transfer:
    """Pieces that lie one behind the other, over one connection as long as it holds."""

    def __init__(self, run: TransferRun, span: Sequence[FilePiece]) -> None:
        self.owner, self.left = run, deque(span)
        self.growing: Growing | None = None
        self.doubted: set[FilePiece] = set()
        self.received = 0

    def run(self) -> None:
        """Raises what `fetch` raises, and Stopped."""
        first = self.left[0]
        try:
            self.owner.go_on()
            patient(self.attempt, first.label, self.owner.say, pause=self.owner.pause, moved=lambda: self.received)
        finally:
            if self.growing:
                self.growing.close()

    def attempt(self) -> None:
        while self.left:
            piece = self.left[0]
            if self.growing is None:
                self.begin(fresh=not (piece.sha256 or piece.git))  # a lost power may leave wrong bytes, untold
            assert self.growing
            if self.growing.size == piece.length:
                self.finish()
                continue
            begin, end = piece.begin + self.growing.size, self.left[-1].end
            with piece.origin.open(piece.file, begin, end, piece.size, anew=piece in self.doubted) as chunks:
                self.take(chunks, begin, end)

    def take(self, chunks: Iterable[bytes], at: int, end: int) -> None:
        """Cut what comes, from byte `at` of the file on, into the pieces; ends early at a piece that is wrong."""
        begin, local = at, isinstance(self.left[0].origin, FolderOrigin)
        for chunk in chunks:
            self.owner.go_on()
            self.owner.count(received=len(chunk), local=local)
            self.received += len(chunk)
            view = memoryview(chunk)
            while view and self.left:
                piece = self.left[0]
                step = min(len(view), (piece.begin if at < piece.begin else piece.end) - at)
                if at >= piece.begin:
                    if self.growing is None:
                        self.begin(fresh=True)
                    assert self.growing
                    self.growing.write(view[:step])
                    self.owner.count(there=step)
                at, view = at + step, view[step:]
                if at == piece.end and not self.finish():
                    return
        if at < end:
            raise Temporary(f"the connection broke after {at - begin:,} of {end - begin:,} bytes")

    def begin(self, *, fresh: bool) -> None:
        piece = self.left[0]
        self.growing = Growing(piece, fresh=fresh)
        if self.growing.size:
            self.owner.count(there=self.growing.size)
            self.owner.say(f"{piece.what}: {self.growing.size / 1e6:,.1f} MB are there from an earlier run")

    def finish(self) -> bool:
        """Move the whole piece to its place; False if its bytes are wrong and are to be asked for once more."""
        assert self.growing
        piece, growing, self.growing = self.left[0], self.growing, None
        if growing.is_right:
            growing.keep(piece.place(growing.sha256.hexdigest()))
            self.owner.done[piece] = growing.sha256.hexdigest()
            self.left.popleft()
            return True
        growing.discard()
        self.owner.count(there=-piece.length)
        if piece in self.doubted:
            raise growing.mismatch(piece.origin.mend or self.owner.advice)
        self.doubted.add(piece)
        self.owner.say(f"{piece.label} arrived with wrong bytes: asking for it once more")
        return False


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
