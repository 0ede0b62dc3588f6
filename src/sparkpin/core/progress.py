"""How far long work is, every few seconds. Also while nothing moves: an engine is silent until it has gathered
what it was asked for, and while it unpacks what it was sent.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from sparkpin.core.terminal import say

EVERY = 5.0  # seconds between two lines
GATHERS, UNPACKS = "the engine gathers them", "the engine unpacks them"


@contextlib.contextmanager
def progress(total: int | None = None, *, before: str = "", after: str = "") -> Iterator[Callable[[int], None]]:
    """Gives a function to call with each number of bytes that is done, of `total` where that is known; it may be called
    from any thread.

    before, after: what goes on until the first and after the last of them.
    """
    done, lock = 0, threading.Lock()

    def add(count: int) -> None:
        nonlocal done
        with lock:
            done += count

    def show() -> None:
        shown = done if total is None else min(done, total)
        of = "" if total is None else f" of {total / 1e6:.1f}"
        now = before if not done else after if shown == total else ""
        say(f"  {shown / 1e6:.1f}{of} MB{f': {now}' if now else ''}")

    with ticking(show):
        yield add


@contextlib.contextmanager
def waiting(what: str, every: float | None = None) -> Iterator[None]:
    """For work of unknown length. every: seconds; None: `EVERY`."""
    began = time.monotonic()
    with ticking(lambda: say(f"  {what}, {time.monotonic() - began:.0f} s"), every):
        yield


@contextlib.contextmanager
def ticking(show: Callable[[], None], every: float | None = None) -> Iterator[None]:
    """Every `every` seconds, from a thread of its own."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(every or EVERY):
            show()

    thread = threading.Thread(target=watch, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
