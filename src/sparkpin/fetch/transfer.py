"""Pieces of files: several at once, verified by hash, resumed after a cut or a kill. All that is fetched comes so.

A piece grows in a file of its own, `Piece.part`, and moves to its place by one rename, when it is complete and its hash
is right. What a cut, a kill or a full disk leaves of it stays, and only the rest is requested.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from sparkpin.checkpoint.write import link_or_copy
from sparkpin.core import files, terminal
from sparkpin.core.errors import IntegrityError, NetworkError, SparkpinError
from sparkpin.core.terminal import say
from sparkpin.fetch.store import LOST, Store
from sparkpin.pins.schema import LockedFile

T = TypeVar("T")
Chunks = Iterable[bytes]
CONNECTIONS = 8
TRIES = 5  # failures in a row after which a server is given up, with 15 s of pauses between them
PATIENCE = 600.0  # seconds of pauses in a row; the Hub counts requests in windows of five minutes
MOVED = 1 << 20  # bytes that must have arrived for a broken connection to count as the first one again
PROGRESS_SECONDS = 5.0
AGAIN = "check the connection, then run the same command again: what has arrived is kept"
NEVER = threading.Event()


class Temporary(Exception):
    """A failure that may pass. after: seconds that the server asks us to wait; next_step: if it does not pass."""

    def __init__(self, cause: str, after: float = 0, *, next_step: str = AGAIN) -> None:
        super().__init__(cause)
        self.after, self.next_step = after, next_step


class TransferStopped(Exception):
    """Another transfer failed, or a person stopped the run."""


class Missing(NetworkError):
    """A server answers, and has no such file: it may have others."""


class Silent(NetworkError):
    """A server was given up: it is not asked for other files either."""


class Source(Protocol):
    """A place that has files. host: one that is silent is not asked again; next_step: for wrong bytes of it."""

    @property
    def host(self) -> str: ...
    @property
    def next_step(self) -> str: ...
    def place(self, file: str) -> str:
        """For messages: without passwords."""

    def local(self, file: str, size: int) -> Path | None:
        """The file where it lies on this machine, which is only read."""

    def open(self, file: str, begin: int, end: int, size: int, *, again: bool) -> AbstractContextManager[Chunks]:
        """The bytes `begin` to `end` of a file of `size` bytes, in chunks; fewer if the connection breaks.

        again: past caches, because what arrived was wrong. Raises Temporary, also in the body of the context,
        NetworkError, and IntegrityError where the file is another one.
        """


@dataclass(frozen=True)
class Folder:
    """A folder of this machine. next_step: what to do about a wrong file; "" for one that is made here."""

    folder: Path
    next_step: str = ""
    host: str = ""

    def place(self, file: str) -> str:
        return str(self.folder / file)

    def size(self, file: str) -> int:
        return (self.folder / file).stat().st_size

    def local(self, file: str, size: int) -> Path | None:
        return self.folder / file if is_whole(self.folder / file, size) else None

    @contextlib.contextmanager
    def open(self, file: str, begin: int, end: int, size: int, *, again: bool) -> Iterator[Chunks]:
        message = f"{self.folder / file}: no such file, or one of another size than {size} bytes"
        raise IntegrityError(message, next_step=self.next_step or AGAIN)
        yield


@dataclass(frozen=True, eq=False, slots=True)
class Piece:
    """Bytes `begin` to `end` of a file of `size` bytes.

    sources: the likeliest first; part: where it grows, used by no other piece; target: where it ends, on the same disk;
    sha256: the locked one, or "" while no lock has one; name: for messages.
    """

    sources: Sequence[Source]
    file: str
    size: int
    begin: int
    end: int
    part: Path
    target: Path
    sha256: str = ""
    name: str = ""

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
        return min(self.length, sum(path.stat().st_size for path in (self.part, self.target) if path.is_file()))

    def is_here(self) -> bool:
        """Whether the target is there and right. Without a hash only what a killed run brought is believed."""
        is_known = self.sha256 or self.target.parent == self.part.parent
        return bool(is_known) and is_whole(self.target, self.length) and self.is_right(self.target)

    def is_right(self, path: Path) -> bool:
        return not self.sha256 or files.sha256_file(path)[0] == self.sha256

    def settle(self, source: Source) -> None:
        """Move the complete part to its place, or remove it and raise IntegrityError.

        It is read once more for that, so that its first bytes, of an earlier run, are hashed as well as its last: after
        a loss of power a file can have the right length and wrong bytes.
        """
        if not self.is_right(self.part):
            sha256, size = files.sha256_file(self.part)
            self.part.unlink()
            raise IntegrityError.mismatch(
                source.place(self.file),
                expected_size=self.length,
                expected_sha256=self.sha256,
                size=size,
                sha256=sha256,
                next_step=source.next_step,
            )
        self.target.parent.mkdir(parents=True, exist_ok=True)
        if self.part.stat().st_nlink == 1:  # else it is somebody's own
            self.part.chmod(0o444)  # checkpoints have hard links to such files, so nothing may write into them
        files.sync_file(self.part)
        self.part.replace(self.target)
        files.sync_folder(self.target.parent)


def fetch(pieces: Sequence[Piece], *, title: str, connections: int = CONNECTIONS, go_on: bool = False) -> None:
    """Bring every piece to its place, verified; if one fails, those that are on their way are broken off and kept.

    go_on: what no source has keeps nothing else from being fetched. Raises NetworkError, IntegrityError, DiskError.
    """
    stop, silent, begun = threading.Event(), set[str](), time.monotonic()
    total, before = sum(piece.length for piece in pieces), sum(piece.present for piece in pieces)
    # Largest first, or one connection would have the last large one to itself.
    ordered = sorted(pieces, key=lambda piece: -piece.length)
    with ThreadPoolExecutor(connections, thread_name_prefix="fetch") as pool:
        jobs = [pool.submit(bring, piece, stop, silent) for piece in ordered]
        try:
            left = set(jobs)
            while left:
                done, left = wait(left, timeout=PROGRESS_SECONDS, return_when=FIRST_EXCEPTION)
                failed = [error for job in done if (error := job.exception())]
                passing = (isinstance(e, NetworkError | IntegrityError) and not isinstance(e, Silent) for e in failed)
                if failed and not (go_on and all(passing)):
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
    errors = [error for job in jobs if (error := job.exception()) and not isinstance(error, TransferStopped)]
    for error in errors[1:]:
        say(str(error).partition("\n  next: ")[0])
    if errors:
        raise errors[0]


def bring(piece: Piece, stop: threading.Event, silent: set[str]) -> None:
    """Bring one piece to its place, from the first source that has it. silent: hosts that were given up."""
    faults = list[SparkpinError]()
    with files.disk_errors(piece.part.parent):
        piece.part.parent.mkdir(parents=True, exist_ok=True)
        if piece.part.exists():
            found = piece.part.stat()
            if found.st_nlink > 1 or found.st_size > piece.length or not piece.sha256:
                piece.part.unlink()  # somebody's own, or nothing that a hash would show to be right
            else:
                piece.part.chmod(0o644)  # a run that was killed in `settle` left it read-only
        for source in piece.sources:
            try:
                if source.host in silent:
                    raise Silent(f"{source.place(piece.file)} does not answer", next_step=AGAIN)
                return bring_from(source, piece, stop)
            except (NetworkError, IntegrityError) as error:
                faults.append(error)
                silent |= {source.host} if isinstance(error, Silent) else set()
    if piece.part.is_file() and not piece.part.stat().st_size:
        piece.part.unlink()
    faults = faults or [Missing("no index or mirror that is asked offers it", next_step=LOST)]
    worst = next(each for kind in (IntegrityError, Missing, NetworkError) for each in faults if isinstance(each, kind))
    causes = "\n    ".join(error.message for error in faults)
    raise type(worst)(f"cannot fetch {piece.label}: {causes}", next_step=worst.next_step or piece.sources[0].next_step)


def bring_from(source: Source, piece: Piece, stop: threading.Event) -> None:
    """Bytes that are wrong are requested once more, of a file that is here from where it came."""

    def receive(again: bool) -> None:
        with piece.part.open("ab") as file:
            begin = piece.begin + file.tell()
            if begin < piece.end:
                with source.open(piece.file, begin, piece.end, piece.size, again=again) as chunks:
                    for chunk in chunks:  # to the end of the answer, or its connection could not be used again
                        pause(stop, 0)
                        file.write(chunk)
                        file.flush()  # a kill loses no byte
                if file.tell() < piece.length:
                    raise Temporary(f"the connection broke after {file.tell():,} of {piece.length:,} bytes")

    for again in (False, True):
        if path := None if again else source.local(piece.file, piece.size):
            take(path, piece)
        else:
            patient(functools.partial(receive, again), piece.label, stop=stop, at=lambda: piece.present)
        try:
            return piece.settle(source)
        except IntegrityError:
            if again or isinstance(source, Folder):
                raise
        say(f"{piece.label} arrived with wrong bytes: asking for it once more")


def take(path: Path, piece: Piece) -> None:
    """From a file of this machine. A complete shard is linked, which saves its bytes."""
    piece.part.unlink(missing_ok=True)
    if piece.length == piece.size and path.suffix == ".safetensors":
        link_or_copy(path.resolve(), piece.part)
        return
    with path.open("rb") as file, piece.part.open("wb") as target:
        file.seek(piece.begin)
        for begin in range(piece.begin, piece.end, files.CHUNK):
            target.write(file.read(min(files.CHUNK, piece.end - begin)))


def is_whole(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


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
    wanted: Iterable[tuple[LockedFile, Sequence[Source]]],
    store: Store,
    *,
    title: str,
    connections: int = CONNECTIONS,
) -> None:
    """Locked files into the store, each from the first of its sources that has it. The caller holds the store's lock.
    What nobody has keeps nothing else from being fetched."""
    pieces = []
    for file, sources in wanted:
        part, target = store.incoming / f"{file.sha256}.part", store.path(file.sha256)
        name = f"{file.name} {file.version} ({file.file}, sha256={file.sha256})"
        pieces.append(Piece(sources, file.file, file.size, 0, file.size, part, target, file.sha256, name))
    fetch(pieces, title=f"  {title}", connections=connections, go_on=True)
    with contextlib.suppress(OSError):
        store.incoming.rmdir()
