"""How far long work is, told every few seconds. Also while nothing moves: an engine is silent until it has gathered
what it was asked for, and while it unpacks what it was sent.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from sparkpin.core.terminal import Say

Gathered = Callable[[], int | None]
EVERY = 5.0  # seconds between two lines
GATHERS, UNPACKS = "the engine gathers them", "the engine unpacks them"


class Progress:
    """Bytes that are done, of `total` where that is known.

    before, after: what goes on until the first and after the last of them. gathered: bytes until the first of them,
    None where nobody can tell.
    """

    def __init__(self, say: Say, total: int | None, before: str, after: str, gathered: Gathered) -> None:
        self.say, self.total, self.before, self.after, self.gathered = say, total, before, after, gathered
        self.done, self.told = 0, time.monotonic()
        self.lock = threading.Lock()

    def add(self, count: int) -> None:
        with self.lock:
            self.done += count
        self.tell()

    def tell(self) -> None:
        """Unless a line was told just now."""
        with self.lock:
            if time.monotonic() - self.told < EVERY:
                return
            self.told = time.monotonic()
        self.say(self.line)

    @property
    def line(self) -> str:
        seen = self.done or self.gathered() or 0
        done = seen if self.total is None else min(seen, self.total)
        total = "" if self.total is None else f" of {self.total / 1e6:.1f}"
        now = self.before if not self.done else self.after if done == self.total else ""
        return f"  {done / 1e6:.1f}{total} MB{f': {now}' if now else ''}"


@contextlib.contextmanager
def progress(
    say: Say,
    total: int | None = None,
    *,
    before: str = "",
    after: str = "",
    gathered: Gathered = lambda: None,
) -> Iterator[Callable[[int], None]]:
    """Gives a function to call with each number of bytes that is done; it may be called from any thread."""
    work = Progress(say, total, before, after, gathered)
    with ticking(work.tell):
        yield work.add


@contextlib.contextmanager
def waiting(say: Say, what: str) -> Iterator[None]:
    """For work that cannot tell how far it is."""
    began = time.monotonic()
    with ticking(lambda: say(f"  {what}, {time.monotonic() - began:.0f} s")):
        yield


@contextlib.contextmanager
def ticking(tell: Callable[[], None]) -> Iterator[None]:
    """Every `EVERY` seconds, from a thread of its own."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(max(EVERY, 0.1)):
            tell()

    thread = threading.Thread(target=watch, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
