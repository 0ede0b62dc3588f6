"""How far a server's start is, read off vLLM's log, and the wait for its first answer."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sparkpin.core.errors import SmokeError
from sparkpin.core.terminal import say
from sparkpin.pins.vllm_flags import flag_value

STAGES = ("start", "weights", "compile", "cache", "graphs", "ready")
# What vLLM 0.30 to 0.33 writes as it starts, in this order: the stage that has begun by then, and words for a person,
# into which the first group goes.
STEPS = (
    ("start", r"\bversion (\d+\.\d+\S*)\s", "vLLM {} reads its configuration"),
    ("start", r"Resolved architecture: (\S+)", "the model is a {}"),
    ("start", r"Initializing a V1 LLM engine", "starting the engine"),
    ("weights", r"Starting to load model|Loading safetensors|Loading weights with", "loading weights"),
    ("compile", r"Loading weights took ([\d.]+)", "weights loaded in {} s"),
    ("compile", r"torch\.compile takes ([\d.]+)", "compiled in {} s"),
    ("cache", r"KV cache size: ([\d,]+) tokens", "room for {} tokens in the cache"),
    ("graphs", r"Capturing CUDA graph", "capturing CUDA graphs"),
    ("graphs", r"Graph capturing finished in ([\d.]+)", "CUDA graphs captured in {} s"),
    ("graphs", r"init engine .* took ([\d.]+)", "engine ready after {} s"),
    ("ready", r"Application startup complete", "answering"),
)
PERCENT = re.compile(r"(\d+)%[^\r\n]*?\b(\d+)/(\d+)")  # progress bars of vLLM: of the checkpoint's files, of the graphs
LOOK_SECONDS = 1.0  # at most: a short start is looked at more often
ASK_SECONDS = 15.0  # between two requests while the log does not say that it answers: its words may change
PROGRESS_SECONDS = 15
QUARTERS = 25  # percent between two lines
LOAD_FORMAT = "--load-format"
LOADED = re.compile(r"Loading weights took ([\d.]+) seconds")


class StartFault(Exception):
    """The server did not become ready; the text says why."""


class NotReady(SmokeError):
    """The same of a server that was to be served. log: all that it wrote."""

    def __init__(self, message: str, log: bytes, *, next_step: str) -> None:
        super().__init__(message, next_step=next_step)
        self.log = log


@dataclass
class Startup:
    """Gets all of the log, again and again. began: stage -> seconds since the start."""

    began: dict[str, float] = field(default_factory=lambda: {"start": 0.0})
    percent: int | None = None
    done: str = ""
    read: int = 0
    step: int = 0  # of STEPS, the next one

    @property
    def stage(self) -> str:
        return max(self.began, key=STAGES.index)

    @property
    def ready(self) -> bool:
        return self.stage == STAGES[-1]

    @property
    def text(self) -> str:
        """Such as "weights 67 % (2 of 3)"."""
        return f"{self.stage} {self.percent} %{self.done}" if self.percent is not None else self.stage

    def update(self, log: bytes, seconds: float) -> list[str]:
        """What is new, in words. A line that is not complete counts: a progress bar rewrites its own."""
        text = log[self.read :].decode(errors="replace")
        self.read = max(self.read, log.rfind(b"\n") + 1)
        news = []
        for number, (stage, pattern, words) in enumerate(STEPS[self.step :], start=self.step + 1):
            if not (found := re.search(pattern, text)):
                continue
            self.step = number
            news.append(words.format(*found.groups()))
            if STAGES.index(stage) > STAGES.index(self.stage):
                self.began[stage] = round(seconds, 1)
                self.percent, self.done = None, ""
        if self.stage in ("weights", "graphs") and (seen := PERCENT.findall(text)):
            before, (share, count, total) = self.percent or 0, seen[-1]
            self.percent, self.done = int(share), f" ({count} of {total})"
            if self.percent // QUARTERS > before // QUARTERS:
                news.append(self.text)
        return news


def wait_for_answer(
    look: Callable[[], tuple[str | None, bytes]], answers: Callable[[Startup], bool], timeout: float
) -> tuple[float, Startup]:
    """Seconds that it took, and its stages.

    look: why the server ended, None while it runs, and its log. answers: ask it, where that is worth a question.

    StartFault as soon as it ends, or when it has not answered after `timeout` seconds.
    """
    watched, begin = Startup(), time.monotonic()
    last = begin
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
        if answers(watched):
            if not watched.ready:  # it may have written so while it was asked
                for line in watched.update(look()[1], time.monotonic() - begin):
                    say(line)
            return time.monotonic() - begin, watched
        if now - begin > timeout:
            raise StartFault(f"gave no answer within {timeout:.0f} s")
        time.sleep(min(LOOK_SECONDS, 0.1 + (now - begin) / 20))


class Seldom:
    """Asks by a costly way: once the log says that the server answers, and now and then before that."""

    def __init__(self, ask: Callable[[], bool]) -> None:
        self.ask, self.asked = ask, time.monotonic()

    def __call__(self, watched: Startup) -> bool:
        if not watched.ready and time.monotonic() - self.asked < ASK_SECONDS:
            return False
        self.asked = time.monotonic()
        return self.ask()


def load_format(argv: Sequence[str]) -> str:
    """vLLM's loader of the weights (docs/memory.md)."""
    return flag_value(argv, LOAD_FORMAT) or "auto"


def weights_seconds(log: bytes) -> float | None:
    """What vLLM's log reports for reading weights, a draft model's included; None where it has no such line."""
    found = [float(match) for match in LOADED.findall(log.decode(errors="replace"))]
    return round(sum(found), 2) if found else None
