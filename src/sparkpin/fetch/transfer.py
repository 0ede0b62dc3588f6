"""Pieces of files: several at once, verified by hash, resumed after a cut or a kill. All that is fetched comes so.

A piece grows in a file beside its place, `Piece.part`, and moves there by one rename, when it is complete and its hash
is right. What a cut, a kill or a full disk leaves of it stays, and only the rest is requested.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from sparkpin.core import files, terminal
from sparkpin.core.errors import IntegrityError, NetworkError, SparkpinError
from sparkpin.core.progress import ticking
from sparkpin.core.terminal import say
from sparkpin.fetch.store import LOST, Store, is_whole, move
from sparkpin.pins.schema import LockedFile

T = TypeVar("T")
CONNECTIONS = 8
TRIES = 5  # failures in a row after which a server is given up, with 15 s of pauses between them
PATIENCE = 600.0  # seconds of pauses in a row; the Hub counts requests in windows of five minutes
MOVED = 1 << 20  # bytes that must have arrived for a broken connection to count as the first one again
AGAIN = "check the connection, then run the same command again: what has arrived is kept"
NEVER = threading.Event()


class Temporary(Exception):
    """A failure that may pass. after: seconds that the server asks us to wait; next_step: if it does not pass."""

    def __init__(self, cause: str, after: float = 0, *, next_step: str = AGAIN) -> None:
        super().__init__(cause)
        self.after, self.next_step = after, next_step


class TransferStopped(Exception):
    """Another transfer failed, or a person stopped the run."""


class Silent(NetworkError):
    """A server was given up: it is not asked for other files either."""


class Source:
    """A place that has files. next_step: for wrong bytes of it."""

    next_step: str = LOST

    @property
    def host(self) -> str:
        """Whom not to ask again where he is silent."""
        return ""

    def place(self, file: str) -> str:
        """For messages: without passwords."""
        raise NotImplementedError

    def local(self, file: str, size: int) -> Path | None:
        """The file where it lies on this machine, which is only read."""
        return None

    def open(self, piece: Piece, begin: int, *, again: bool) -> AbstractContextManager[Iterable[bytes]]:
        """A piece's bytes from `begin` on, in chunks; fewer if the connection breaks.

        again: past caches, because what arrived was wrong. Raises Temporary, also in the body of the context,
        NetworkError, and IntegrityError where the file is another one.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Folder(Source):
    """A folder of this machine. next_step: what to do about a wrong file."""

    folder: Path
    next_step: str

    def place(self, file: str) -> str:
        return str(self.folder / file)

    def size(self, file: str) -> int:
        return (self.folder / file).stat().st_size

    def local(self, file: str, size: int) -> Path:
        if not is_whole(path := self.folder / file, size):
            got = f"{path.stat().st_size} bytes" if path.is_file() else "no file"
            raise IntegrityError(f"{path}: got {got}, expected {size} bytes", next_step=self.next_step)
        return path


@dataclass(frozen=True, eq=False, slots=True)
class Piece:
    """Bytes `begin` to `end` of a file of `size` bytes.

    sources: the likeliest first; target: its place, which no other piece of this run has; sha256: the locked one, or ""
    while no lock has one; name: for messages; owner: whose lock the run holds, where a run that holds another may bring
    the same bytes to the same place.
    """

    sources: Sequence[Source]
    file: str
    size: int
    begin: int
    end: int
    target: Path
    sha256: str = ""
    name: str = ""
    owner: str = ""

    @property
    def part(self) -> Path:
        return self.target.with_name(f"{self.target.name}{self.owner and '.'}{self.owner}.part")

    @property
    def length(self) -> int:
        return self.end - self.begin

    @property
    def label(self) -> str:
        span = "" if self.length == self.size else f"bytes {self.begin}-{self.end - 1} of "
        return f"{span}{self.name or self.sources[0].place(self.file)}"

    @property
    def present(self) -> int:
        """Bytes that are on the disk."""
        for path in (self.part, self.target):  # in this order: another thread may move it in between
            with contextlib.suppress(FileNotFoundError):
                return min(self.length, path.stat().st_size)
        return 0

    def is_here(self) -> bool:
        """Whether it is in its place, and right. Without a hash that place is one that only a killed `lock` fills."""
        return is_whole(self.target, self.length) and self.sha256 in ("", files.sha256_file(self.target)[0])

    def prepare(self) -> None:
        """Keep only a part of an earlier run that a hash will show to be right, and that is nobody's own."""
        self.part.parent.mkdir(parents=True, exist_ok=True)
        if self.part.exists():
            found = self.part.stat()
            if found.st_nlink > 1 or found.st_size > self.length or not self.sha256:
                self.part.unlink()
            else:
                self.part.chmod(0o644)  # a killed run may have been about to move it

    def settle(self, source: Source) -> None:
        """Move the complete part to its place, or remove it and raise IntegrityError.

        It is read once more for that, so that its first bytes, of an earlier run, are hashed as well as its last: after
        a loss of power a file can have the right length and wrong bytes.
        """
        sha256, size = files.sha256_file(self.part)
        if self.sha256 not in ("", sha256):
            self.part.unlink()
            got, expected = (sha256, size), (self.sha256, self.length)
            raise IntegrityError.mismatch(source.place(self.file), got, expected, source.next_step)
        files.sync_file(self.part)
        if self.part.stat().st_nlink == 1:  # else it is somebody's own
            self.part.chmod(0o444)  # checkpoints have hard links to such files, so nothing may write into them
        move(self.part, self.target)
        files.sync_folder(self.target.parent)


def fetch(pieces: Sequence[Piece], *, title: str, connections: int = CONNECTIONS, go_on: bool = False) -> None:
    """Bring every piece to its place, verified; if one fails, those that are on their way are broken off and kept.

    go_on: what no source has keeps nothing else from being fetched. Raises NetworkError, IntegrityError, DiskError.
    """
    stop, silent, begun = threading.Event(), set[str](), time.monotonic()
    total, before = sum(piece.length for piece in pieces), sum(piece.present for piece in pieces)

    def show() -> None:
        present = sum(piece.present for piece in pieces)
        rate = (present - before) / (time.monotonic() - begun)
        left = f"{terminal.duration((total - present) / rate)} left" if rate > 0 else "nothing arrives"
        say(f"{title}: {terminal.size(present)} of {terminal.size(total)}, {terminal.size(round(rate))}/s, {left}")

    # Largest first, or one connection would have the last large one to itself.
    ordered = sorted(pieces, key=lambda piece: -piece.length)
    with ticking(show), ThreadPoolExecutor(connections, thread_name_prefix="fetch") as pool:
        jobs = [pool.submit(bring, piece, stop, silent) for piece in ordered]
        try:
            for job in as_completed(jobs):
                error = job.exception()
                is_of_one = isinstance(error, NetworkError | IntegrityError) and not isinstance(error, Silent)
                if error and not (go_on and is_of_one):
                    stop.set()
        except BaseException:
            stop.set()
            raise
    errors = [error for job in jobs if (error := job.exception()) and not isinstance(error, TransferStopped)]
    for error in errors[1:]:
        say(str(error).partition("\n  next: ")[0])
    if errors:
        raise errors[0]


def bring(piece: Piece, stop: threading.Event, silent: set[str]) -> None:
    """Bring one piece to its place, from the first source that has it. silent: hosts that were given up."""
    faults = list[SparkpinError]()
    with files.disk_errors(piece.target.parent):
        if piece.is_here():
            return
        piece.prepare()
        for source in piece.sources:
            try:
                if source.host in silent:
                    raise Silent(f"{source.place(piece.file)} does not answer", next_step=AGAIN)
                return bring_from(source, piece, stop)
            except (NetworkError, IntegrityError) as error:
                faults.append(error)
                silent |= {source.host} if isinstance(error, Silent) else set()
        if piece.part.exists() and not piece.part.stat().st_size:
            piece.part.unlink()
    faults = faults or [NetworkError("no index or mirror that is asked offers it", next_step=LOST)]
    # Silent only where all are: it would end the other pieces, which the other sources have.
    worst = max(faults, key=lambda error: (isinstance(error, IntegrityError), not isinstance(error, Silent)))
    causes = "\n    ".join(error.message for error in faults)
    raise type(worst)(f"cannot fetch {piece.label}: {causes}", next_step=worst.next_step or piece.sources[0].next_step)


def bring_from(source: Source, piece: Piece, stop: threading.Event) -> None:
    """Bytes that are wrong are requested once more, of a file that is here from where it came."""

    def receive(again: bool) -> None:
        with piece.part.open("ab") as file:
            begin = piece.begin + file.tell()
            if begin == piece.end:
                return
            with source.open(piece, begin, again=again) as chunks:
                for chunk in chunks:  # to the end of the answer, or its connection could not be used again
                    pause(stop, 0)
                    file.write(chunk)
                    file.flush()  # a kill loses no byte
            if file.tell() < piece.length:
                raise Temporary(f"the connection broke after {file.tell():,} of {piece.length:,} bytes")

    for again in (False, True):
        if path := None if again else source.local(piece.file, piece.size):
            copy(path, piece, stop)
        else:
            patient(functools.partial(receive, again), piece.label, stop=stop, at=lambda: piece.present)
        try:
            return piece.settle(source)
        except IntegrityError:
            if again or isinstance(source, Folder):
                raise
        say(f"{piece.label} arrived with wrong bytes: asking for it once more")


def copy(path: Path, piece: Piece, stop: threading.Event) -> None:
    """From a file of this machine. A complete shard is linked, which saves its bytes."""
    piece.part.unlink(missing_ok=True)
    if piece.length == piece.size and path.suffix == ".safetensors":
        with contextlib.suppress(OSError):  # of another file system
            return os.link(path.resolve(), piece.part)
    with path.open("rb") as file, piece.part.open("wb") as target:
        file.seek(piece.begin)
        for begin in range(piece.begin, piece.end, files.CHUNK):
            pause(stop, 0)
            target.write(file.read(min(files.CHUNK, piece.end - begin)))


def patient(ask: Callable[[], T], what: str, *, stop: threading.Event = NEVER, at: Callable[[], int] = int) -> T:
    """Ask until there is an answer; Silent after TRIES failures in a row, or where the server asks for more than
    PATIENCE. at: bytes that have arrived."""
    failures, waited, before = 0, 0.0, at()
    while True:
        try:
            pause(stop, 0)
            return ask()
        except Temporary as error:
            if at() - before >= MOVED:
                failures, waited = 0, 0.0
            seconds, before = max(error.after, 2.0**failures), at()
            failures, waited = failures + 1, waited + seconds
            if failures == TRIES or waited > PATIENCE:
                raise Silent(f"{error} ({failures} times in a row)", next_step=error.next_step) from error
            say(f"{what}: {error}; asking again in {seconds:.0f} s")
            pause(stop, seconds)


def pause(stop: threading.Event, seconds: float) -> None:
    if stop.wait(seconds):
        raise TransferStopped


def fetch_files(
    wanted: Iterable[tuple[LockedFile, Sequence[Source]]], store: Store, *, title: str, connections: int = CONNECTIONS
) -> None:
    """Locked files into the store, each from the first of its sources that has it. The caller holds the store's lock.
    What nobody has keeps nothing else from being fetched."""
    pieces = []
    for file, sources in wanted:
        name = f"{file.name} {file.version} ({file.file}, sha256={file.sha256})"
        pieces.append(Piece(sources, file.file, file.size, 0, file.size, store.path(file.sha256), file.sha256, name))
    fetch(pieces, title=f"  {title}", connections=connections, go_on=True)
