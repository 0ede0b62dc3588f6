"""The start-up as a person sees it: a bar on a terminal, else a line for each step."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Protocol

from sparkpin.core.terminal import Say
from sparkpin.releases import container as running
from sparkpin.serve.startup import LastStart, Startup
from sparkpin.smoke.server import PROGRESS_SECONDS

QUARTERS = 25  # percent between two lines where there is no terminal


class View(Protocol):
    def update(self, startup: Startup, log: bytes, seconds: float) -> None: ...


class Lines:
    """Each step of vLLM once, the weights by quarters, and that it goes on where it says nothing for a while."""

    def __init__(self, say: Say) -> None:
        self.say, self.steps, self.told, self.last = say, running.StartProgress(say), 0, 0.0

    def update(self, startup: Startup, log: bytes, seconds: float) -> None:
        if self.steps.update(log):
            self.last = seconds
        elif seconds - self.last > PROGRESS_SECONDS:
            self.last = seconds
            self.say(f"waiting for the server, {seconds:.0f} s")
        if startup.stage != "weights" or startup.percent is None:
            self.told = 0
        elif startup.percent >= self.told + QUARTERS:
            self.told = startup.percent
            self.say(startup.text)


class Bar:
    """Against the time that the last start took; without one it moves and promises nothing."""

    def __init__(self, last: LastStart | None) -> None:
        from rich.console import Console  # slow to import
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        parts = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[last]}")
        self.progress = Progress(*parts, console=Console(stderr=True), transient=True)
        self.last = last
        self.task = self.progress.add_task("start", total=1.0 if last else None, last=f"({last.line})" if last else "")

    def update(self, startup: Startup, log: bytes, seconds: float) -> None:
        done = share(self.last, startup, seconds) if self.last else 0
        self.progress.update(self.task, description=startup.text, completed=done)


def share(last: LastStart, startup: Startup, seconds: float) -> float:
    """Of a start, between 0 and 1; 1 never comes: only an answer ends a start. The stage that it is in counts: what
    came before may have been slower than last time, or quicker."""
    rest = last.seconds - last.began.get(startup.stage, startup.began[startup.stage])
    times = seconds / max(startup.began[startup.stage] + rest, 1.0)
    return 0.9 * times if times < 1 else 1 - 0.1 / times


@contextlib.contextmanager
def shown(last: LastStart | None, say: Say) -> Iterator[View]:
    if not sys.stderr.isatty():
        if last:
            say(last.line)
        yield Lines(say)
        return
    bar = Bar(last)
    with bar.progress:
        yield bar
