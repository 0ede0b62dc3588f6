"""A lock that another process holds."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path

from sparkpin.core import files

fork = multiprocessing.get_context("fork")


def hold(path: Path, shared: bool, held: Event, go: Event) -> None:
    with files.lock(path, shared=shared):
        held.set()
        go.wait(300)


@contextlib.contextmanager
def held_lock(path: Path, *, shared: bool = False) -> Iterator[BaseProcess]:
    """The process is killed (SIGKILL) in the end, if it was not before."""
    held = fork.Event()
    process = fork.Process(target=hold, args=(path, shared, held, fork.Event()))
    process.start()
    try:
        assert held.wait(300)
        yield process
    finally:
        process.kill()
        process.join()
