"""Where the bytes of files come from, asked for by ranges; and the patience to ask again."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from sparkpin.core import files
from sparkpin.core.errors import IntegrityError, NetworkError
from sparkpin.core.terminal import Say

T = TypeVar("T")

TRIES = 6
MOVED = 1 << 20
"""Bytes that must have come for a broken connection to count as the first one again."""
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
    """A repository of the Hub at a revision, or a folder."""

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
