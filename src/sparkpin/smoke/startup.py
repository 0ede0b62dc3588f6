"""How far a server's start is, read off vLLM's log, and the wait for its first answer."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from sparkpin.core.errors import SmokeError
from sparkpin.core.terminal import say
from sparkpin.pins.reading import read_yaml

STEPS: list[tuple[str, str, str]] = read_yaml(Path(__file__).with_name("startup.yaml"))
PERCENT = re.compile(r"(\d+)%[^\r\n]*?\b(\d+)/(\d+)")  # progress bars of vLLM: of the checkpoint's files, of the graphs
LOOK_SECONDS = 1.0  # at most: a short start is looked at more often
PROGRESS_SECONDS = 15
QUARTERS = 25  # percent between two lines


class StartFault(Exception):
    """The server did not become ready; the text says why."""


class NotReady(SmokeError):
    """The same with a post-mortem. logs: all that its containers wrote, by rank."""

    def __init__(self, message: str, logs: tuple[bytes, ...], *, next_step: str) -> None:
        super().__init__(message, next_step=next_step)
        self.logs = logs


@dataclass
class Startup:
    """Gets all of the log, again and again. began: stage -> seconds since the start; text: such as "weights 67 % (2 of
    3)"."""

    began: dict[str, float] = field(default_factory=lambda: {"start": 0.0})
    text: str = "start"
    percent: int = 0
    read: int = 0
    step: int = 0  # of STEPS, the next one

    @property
    def ready(self) -> bool:
        return "ready" in self.began

    def update(self, log: bytes, seconds: float) -> list[str]:
        """What is new, in words. A line that is not complete counts: a progress bar rewrites its own."""
        text, news = log[self.read :].decode(errors="replace"), []
        self.read = max(self.read, log.rfind(b"\n") + 1)
        for number, (stage, pattern, words) in enumerate(STEPS[self.step :], start=self.step + 1):
            if found := re.search(pattern, text):
                self.step = number
                news.append(words.format(*found.groups()))
                if stage not in self.began:
                    self.began[stage], self.text, self.percent = round(seconds, 1), stage, 0
        stage = list(self.began)[-1]
        if stage in ("weights", "graphs") and (bars := PERCENT.findall(text)):
            (share, count, total), before = bars[-1], self.percent
            self.percent, self.text = int(share), f"{stage} {share} % ({count} of {total})"
            if self.percent // QUARTERS > before // QUARTERS:
                news.append(self.text)
        return news


def wait_for_answer(
    look: Callable[[], tuple[str | None, bytes]], answers: Callable[[], bool], timeout: float, every: float = 0
) -> tuple[float, Startup]:
    """Seconds that it took, and its stages.

    look: why the server ended, None while it runs, and its log. answers: ask it; while the log does not say that it is
    ready, at most each `every` seconds: its words may change.

    StartFault as soon as it ends, or when it has not answered after `timeout` seconds.
    """
    watched, begin = Startup(), time.monotonic()
    last = asked = begin
    while True:
        ended, log = look()
        now = time.monotonic()
        news = watched.update(log, now - begin)
        if not news and now - last > PROGRESS_SECONDS:
            news = [f"waiting for the server, {now - begin:.0f} s"]
        for line in news:
            last = now
            say(line)
        if ended:
            raise StartFault(ended)
        if watched.ready or now - asked >= every:
            asked = now
            if answers():
                for line in watched.update(look()[1], time.monotonic() - begin):  # what it wrote while it was asked
                    say(line)
                return time.monotonic() - begin, watched
        if now - begin > timeout:
            raise StartFault(f"gave no answer within {timeout:.0f} s")
        time.sleep(min(LOOK_SECONDS, 0.1 + (now - begin) / 20))
