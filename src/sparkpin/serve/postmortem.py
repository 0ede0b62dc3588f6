"""Why a server died: the first real error, its last words, the machine's state, and what mends it. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sparkpin.core.terminal import size
from sparkpin.releases.inside import BEGUN
from sparkpin.serve.crash_causes import Cause, cause_of

TAIL_LINES = 12
DIVIDES = f"sparkpin: {BEGUN}\n".encode()
READ_LINES = 5000
PREFIX = re.compile(
    r"^(?:\([\w ]+(?: pid=\d+)?\)\s)?"
    r"(?:(?P<level>[A-Z]+)(?: \d\d-\d\d \d\d:\d\d:\d\d (?:\.\.\.)?\[[^\]]*\] ?|: +))?"
)
"""Process and level, which vLLM puts before each line, those of a traceback, too. uvicorn's level ends in a colon."""
ANSWERED = re.compile(r'"(?:GET|POST) /v1/\S* HTTP/1\.\d" 200')
CONSEQUENCE = re.compile(
    r"See root cause above|EngineDeadError|Engine core initialization failed|CancelledError|KeyboardInterrupt|"
    r"^SystemExit|BrokenPipeError"
)
ERROR = re.compile(r"\b(?:[Ee]rror|ERROR|fatal|FATAL|Segmentation fault|Killed|died)\b|\w+(?:Error|Exception)\b")


@dataclass(frozen=True)
class Death:
    """A container that does not serve. how: such as "exited with 71"; restarts: how often Docker started it again;
    health: what its last health check said; machine: lines on memory and GPU, as they are now."""

    tag: str
    recipe: str
    how: str
    restarts: int
    health: str
    machine: Sequence[str]
    log: bytes


def last_life(log: bytes) -> bytes:
    """What the server has written since its last start; Docker keeps one log over all of them."""
    return log.rpartition(DIVIDES)[2]


def last_death(log: bytes) -> bytes:
    """The last life that has ended, else the last."""
    lives = log.split(DIVIDES)
    return next((life for life in reversed(lives) if b"\nsparkpin: ended" in life), lives[-1])


def relevant(log: bytes) -> list[str]:
    """The last lines from the last request on that was answered: before that it was well."""
    lines = [line.rstrip("\r") for line in last_death(log).decode(errors="replace").splitlines()][-READ_LINES:]
    last = max((place for place, line in enumerate(lines) if ANSWERED.search(line)), default=-1)
    rest = lines[last + 1 :]
    return rest if any(line.strip() for line in rest) else lines


def parsed(lines: Sequence[str]) -> list[tuple[str, str]]:
    """Level ("" where the line has none) and text."""
    return [(found.group("level") or "", line[found.end() :]) for line in lines if (found := PREFIX.match(line))]


def grave(lines: Sequence[str]) -> list[str]:
    return [line for level, line in parsed(lines) if level not in ("INFO", "WARNING", "DEBUG")]


def first_error(lines: Sequence[str]) -> str:
    """The exception of the first traceback that is no consequence of another, else the first line that tells of an
    error; "" where there is none."""
    bare = parsed(lines)
    later = ""
    for place, (_, line) in enumerate(bare):
        if line.strip() == "Traceback (most recent call last):":
            end = next((e for e in range(place + 1, len(bare)) if bare[e][1][:1] not in ("", " ")), None)
            if end is None:
                continue
            if not CONSEQUENCE.search(bare[end][1]):
                return bare[end][1].strip()
            later = later or bare[end][1].strip()
    told = [line.strip() for line in grave(lines) if ERROR.search(line)]
    own = [line for line in told if not CONSEQUENCE.search(line)]
    return next(iter([*own, *told]), later)


def cause(death: Death) -> Cause | None:
    lines = relevant(death.log)
    error = first_error(lines)
    return cause_of("\n".join([death.how, *grave(lines)]), has_error=bool(error) and not CONSEQUENCE.search(error))


def report(death: Death) -> list[str]:
    """Lines for a person."""
    lines = relevant(death.log)
    again = f"; Docker started it again {death.restarts} times" if death.restarts > 1 else ""
    again = "; Docker started it again once" if death.restarts == 1 else again
    found = [f"{death.tag} {death.how}{again}"]
    if error := first_error(lines):
        found.append(f"first error: {error}")
    if known := cause(death):
        mend = known.mend.format(recipe=death.recipe, tag=death.tag)
        found += [f"that means: {known.what}", f"to mend it: {mend}"]
    if death.health:
        found.append(f"last health check: {death.health}")
    found += death.machine
    tail = [line for line in lines if line.strip()][-TAIL_LINES:]
    if tail:
        found += ["its last lines:", *(f"  {line}" for line in tail)]
    return found


def memory_line(total: int, available: int, limit: int | None) -> str:
    own = f", the server's limit is {size(limit)}" if limit else ""
    return f"memory now: {size(available)} of {size(total)} available{own}"
