"""Why a server died: the first real error, its last words, the machine's state, and what mends it. Pure.

The first error and what was logged with it are asked before anything else of the log: what follows is mostly of its
making. Causes are the kinds of crash_causes.yaml.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sparkpin.core.terminal import count
from sparkpin.pins.reading import read_yaml
from sparkpin.releases.inside import BEGUN

TAIL_LINES = 12
DIVIDES = f"sparkpin: {BEGUN}\n".encode()
ENDED = b"\nsparkpin: ended"  # process 1's, of a server that ended by itself
READ_LINES = 5000
LINE = 4096  # characters of one: a program may write megabytes without an end, and patterns take longer than that
PREFIX = re.compile(
    r"^(?P<process>\([\w =]+\)\s)?(?:\[rank\d+\]: ?)?"
    r"(?:(?P<level>[A-Z]+)(?: \d\d-\d\d \d\d:\d\d:\d\d (?:\.\.\.)?\[[^\]]*\] ?|: +))?"
)
"""Process and level, which vLLM puts before each line, also of a traceback. uvicorn's level ends in a colon."""
SPELLINGS = read_yaml(Path(__file__).with_name("log_spellings.yaml"))
WATCH, ANSWERED, DEAD, CONSEQUENCE, ERROR = (
    re.compile("|".join(SPELLINGS[kind])) for kind in ("watch", "answered", "dead", "consequence", "error")
)
VERDICTS = (
    (
        re.compile("sparkpin: ended: the (?:kernel killed|machine had)"),
        re.compile("died due to signal 9|Killed signal"),
    ),
    (re.compile("sparkpin: ended: (?:a worker has gone|the machine with torch's store)"), DEAD),
)
"""What process 1 ends a server for that was well: it goes before all errors of the log. After each what knows better:
the compiler that the kernel killed, and an engine that died first, since its own end is seen as one of a worker."""
TRACEBACK = "Traceback (most recent call last):"
VALIDATION = re.compile(r"\d+ validation errors? for \w+")  # pydantic: the reason follows, in lines of its own
KIND = re.compile(r" \[type=.*")  # pydantic's, after the reason


@dataclass(frozen=True)
class Cause:
    """A kind of crash_causes.yaml, which explains the keys."""

    spellings: Sequence[str]
    meaning: str
    remedy: str
    samples: Sequence[str]
    weight: Literal["", "vague", "consequence"] = ""

    def fits(self, text: str) -> bool:
        return any(re.search(one, text) for one in self.spellings)


@functools.cache
def causes() -> tuple[Cause, ...]:
    """Read for a death alone: it takes longer than all else that `status` and `rollback` do."""
    return tuple(Cause(**row) for row in read_yaml(Path(__file__).with_name("crash_causes.yaml")))


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
    return next((life for life in reversed(lives) if ENDED in life), lives[-1])


def until_death(log: bytes) -> bytes:
    """Without the lives after the last that ended by itself; where none did, without the one that runs."""
    lives, ended, rest = log.rpartition(ENDED)
    return lives + ended + rest.partition(DIVIDES)[0] if ended else log.rpartition(DIVIDES)[0]


def relevant(log: bytes) -> list[str]:
    """The last lines, from the last request on that was answered before it died: until then it was well."""
    lines = last_death(log).decode(errors="replace").splitlines()[-READ_LINES:]
    lines = [line[:LINE].rstrip("\r") for line in lines]
    end = next((place for place, line in enumerate(lines) if DEAD.search(line)), len(lines))
    answers = [place for place, line in enumerate(lines[:end]) if ANSWERED.search(line) and not WATCH.match(line)]
    last = max(answers, default=-1)
    rest = lines[last + 1 :]
    return rest if any(line.strip() for line in rest) else lines


@dataclass(frozen=True)
class Line:
    """source: process and level, the same for all lines of one message, None for what a line has not."""

    source: tuple[str | None, str | None]
    text: str


def parsed(lines: Sequence[str]) -> list[Line]:
    found = [(PREFIX.match(line), line) for line in lines]
    return [Line((one["process"], one["level"]), line[one.end() :]) for one, line in found if one]


def grave(lines: Sequence[Line]) -> list[Line]:
    return [line for line in lines if line.source[1] not in ("INFO", "WARNING", "DEBUG")]


@dataclass(frozen=True)
class Fault:
    """An error of the log. message: one line; block: all that was logged with it, its traceback and what follows."""

    message: str
    block: str

    @property
    def is_consequence(self) -> bool:
        return bool(CONSEQUENCE.search(self.message))


def faults(lines: Sequence[Line]) -> Iterator[Fault]:
    """Exceptions by their tracebacks, in order; then the lines that name an error."""
    for place, line in enumerate(lines):
        if line.text.strip() != TRACEBACK:
            continue
        end = next((e for e in range(place + 1, len(lines)) if lines[e].text[:1] not in ("", " ")), None)
        if end is not None:
            last = next((e for e in range(end, len(lines)) if lines[e].source != line.source), len(lines))
            block = "\n".join(one.text for one in lines[place:last])
            yield Fault(reason([one.text for one in lines[end:last]]), block)
    for line in grave(lines):
        if ERROR.search(line.text):
            yield Fault(line.text.strip(), line.text)


def reason(lines: Sequence[str]) -> str:
    """An exception's message. lines: from that on; what pydantic has against a value stands in the lines after it."""
    first, end = lines[0].strip(), 0
    if VALIDATION.search(first):
        end = next((place for place, line in enumerate(lines) if KIND.search(line)), 0)
    more = (KIND.sub("", line).strip().removeprefix("Value error, ") for line in lines[1 : end + 1])
    return ": ".join([first, *more])


def verdict(lines: Sequence[Line]) -> Fault | None:
    """Process 1's, where it goes before all errors of the log."""
    for pattern, better in VERDICTS:
        found = next((line.text for line in lines if pattern.match(line.text)), None)
        if found and not any(better.search(line.text) for line in lines):
            return Fault(found, found)
    return None


def first_fault(lines: Sequence[Line]) -> Fault | None:
    """Process 1's verdict, else the first that is no consequence of another, else the first; None where the log has no
    error."""
    every = list(faults(lines))
    return verdict(lines) or next((one for one in every if not one.is_consequence), every[0] if every else None)


def first_error(lines: Sequence[str]) -> str:
    found = first_fault(parsed(lines))
    return found.message if found else ""


def cause(death: Death) -> Cause | None:
    """The kind that fits process 1's verdict. Without one: the first error, else what is logged with it, else the rest
    of the log.

    A vague kind comes after all others. Of an error that nobody knows neither it nor a consequence in the rest of the
    log is the cause."""
    lines = parsed(relevant(death.log))
    if known := verdict(lines):
        return next((one for one in causes() if one.fits(known.message)), None)
    first = first_fault(lines)
    open_end = first is None or first.is_consequence
    rest = "\n".join([*(line.text for line in grave(lines)), death.how])
    near = [first.message, first.block] if first else []
    tried = [("", [*near, rest]), ("vague", [*near, rest] if open_end else near), ("consequence", [rest] * open_end)]
    kinds = ((weight, text, one) for weight, texts in tried for text in texts for one in causes())
    return next((one for weight, text, one in kinds if one.weight == weight and one.fits(text)), None)


def report(death: Death) -> list[str]:
    """Lines for a person: the log's last ones where no cause is known."""
    lines = relevant(death.log)
    again = f"; Docker started it again {count(death.restarts, 'time')}" if death.restarts else ""
    found = [f"{death.tag} {death.how}{again}"]
    if error := first_error(lines):
        found.append(f"first error: {error}")
    if known := cause(death):
        remedy = known.remedy.format(recipe=death.recipe, tag=death.tag)
        found += [f"that means: {known.meaning}", f"what to do: {remedy}"]
    if death.health:
        found.append(f"last health check: {death.health}")
    found += death.machine
    tail = [line for line in lines if line.strip() and not WATCH.match(line)][-TAIL_LINES:]
    if tail and not known:
        found += ["its last lines:", *(f"  {line}" for line in tail)]
    return found
