"""Where the bytes of files come from, asked for by ranges; and the patience to ask again."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Protocol, TypeVar

from sparkpin.core import files
from sparkpin.core.errors import IntegrityError, NetworkError
from sparkpin.core.terminal import Say

T = TypeVar("T")

TRIES = 6
MOVED = 1 << 20
"""Bytes that must have come for a broken connection to count as the first one again."""
SILENCE = 30.0
"""Seconds without an answer, or between two chunks of it, after which a connection counts as broken."""
LONGEST_PAUSE = 600.0
"""Seconds. The Hub counts requests in windows of five minutes."""
AGAIN = "check the connection, then run the same command again: what is there stays"


class Temporary(Exception):
    """A failure that may be over when one asks again.

    after: seconds that the server wants us to wait; tries: in a row, then it will not pass; next_step: for then.
    """

    def __init__(self, cause: str, after: float = 0, *, tries: int = TRIES, next_step: str = AGAIN) -> None:
        super().__init__(cause)
        self.cause, self.after, self.tries, self.next_step = cause, after, tries, next_step


class FileOrigin(Protocol):
    """A repository of the Hub at a revision, a file of a package index, or a folder."""

    @property
    def name(self) -> str:
        """For messages."""

    @property
    def mend(self) -> str:
        """What to do about bytes that are wrong twice; "" where the caller knows better."""

    def open(
        self, file: str, begin: int, end: int, size: int, *, anew: bool = False
    ) -> AbstractContextManager[Iterator[bytes]]:
        """The bytes `begin` to `end` of a file of `size` bytes, in chunks; fewer if the connection breaks.

        anew: past caches, since what came was wrong. Raises Temporary, in the body of the context, too, and
        SparkpinError for what will not pass.
        """


@dataclass(frozen=True, slots=True)
class FolderOrigin:
    """A plain folder of this machine. It is only read. mend: the next step where it is not what it should be."""

    folder: Path
    mend: str = ""

    @property
    def name(self) -> str:
        return str(self.folder)

    @contextlib.contextmanager
    def open(self, file: str, begin: int, end: int, size: int, *, anew: bool = False) -> Iterator[Iterator[bytes]]:
        path = self.folder / file
        if not path.is_file():
            raise IntegrityError(f"{path}: no such file", next_step=self.mend or AGAIN)
        with path.open("rb") as opened:
            if (seen := os.fstat(opened.fileno()).st_size) != size:
                raise IntegrityError(f"{path}: has {seen} bytes, wanted {size}", next_step=self.mend or AGAIN)
            opened.seek(begin)

            def chunks() -> Iterator[bytes]:
                left = end - begin
                while left and (chunk := opened.read(min(left, files.CHUNK))):
                    left -= len(chunk)
                    yield chunk

            yield chunks()


def read(origin: FileOrigin, file: str, begin: int, end: int, size: int, say: Say) -> bytes:
    """A few bytes of a file."""

    def ask() -> bytes:
        with origin.open(file, begin, end, size) as chunks:
            data = b"".join(chunks)
        if len(data) < end - begin:
            raise Temporary(f"the connection broke after {len(data):,} of {end - begin:,} bytes")
        return data

    return patient(ask, f"{file} of {origin.name}", say)


def patient(
    ask: Callable[[], T],
    what: str,
    say: Say,
    *,
    pause: Callable[[float], object] | None = None,
    moved: Callable[[], int] = int,
) -> T:
    """Ask until there is an answer; NetworkError after as many failures as the last allows. moved: bytes so far."""
    tries, before = 0, moved()
    while True:
        try:
            return ask()
        except Temporary as error:
            now = moved()
            tries, before = (1 if now - before >= MOVED else tries + 1), now
            if tries >= error.tries:
                message = f"cannot fetch {what}: {error.cause} ({tries} times in a row)"
                raise NetworkError(message, next_step=error.next_step) from error
            seconds = min(max(error.after, 2.0 ** (tries - 1)), LONGEST_PAUSE)
            say(f"{what}: {error.cause}; asking again in {seconds:.0f} s")
            (pause or time.sleep)(seconds)


def check_range(answer: Any, begin: int, end: int, size: int, what: str) -> None:
    """That the answer (httpx's) is of the bytes that were asked for; NetworkError, for it will not be another time."""
    headers = answer.headers
    encoding = headers.get("Content-Encoding", "identity")
    if answer.status_code == 206:
        match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", headers.get("Content-Range", ""))
        seen = (int(match[1]), int(match[2]) + 1) if match else None
        right = match is not None and seen == (begin, end) and match[3] in ("*", str(size))
    else:
        right = (begin, end) == (0, size) and headers.get("Content-Length", str(size)) == str(size)
    if not right or encoding != "identity":
        shown = {key: headers[key] for key in ("Content-Range", "Content-Length", "Content-Encoding") if key in headers}
        raise NetworkError(
            f"cannot fetch {what}: asked for bytes {begin}-{end - 1} of {size}; the answer is {answer.status_code}, "
            f"{shown}",
            next_step="the server, or a proxy before it, does not heed ranges: fetch past that proxy (NO_PROXY)",
        )


def wanted_pause(headers: Mapping[str, str]) -> float:
    """Seconds that a server which is asked too much wants to be left alone; 0 where it does not say."""
    from huggingface_hub.utils import parse_ratelimit_headers  # type: ignore[attr-defined]

    value = headers.get("Retry-After", "").strip()
    with contextlib.suppress(ValueError):
        return float(value) if value.isdecimal() else parsedate_to_datetime(value).timestamp() - time.time()
    limit = parse_ratelimit_headers(headers)
    return float(limit.reset_in_seconds + 1) if limit and limit.remaining == 0 else 0
