"""What a run found, as it is kept.

    <folder>/<time>.json          a finished run
    <folder>/<time>-session.json  what was sent, where an answer differed

The folder is `prove` of the release's evidence, or of SPARKPIN_HOME, with the endpoint's host and port.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from pydantic_core import to_jsonable_python

from sparkpin.core import files

STRICT = ConfigDict(strict=True, extra="forbid")
Words = Annotated[tuple[str, ...], Field(strict=False)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PassResult:
    """distances: nats, of each answer from the cold one; bounds: from which on each is no rounding.

    hits: prompt tokens that came from the cache, None where nobody tells; asked: prompt tokens of all its requests.
    """

    name: str
    words: str
    distances: Annotated[tuple[float, ...], Field(strict=False)]
    hits: int | None
    asked: int
    seconds: float
    preempted: int | None = None  # requests that had to make room, and were begun again
    bounds: Annotated[tuple[float, ...], Field(strict=False)] = ()

    @property
    def beyond(self) -> int:
        return sum(far > bound for far, bound in zip(self.distances, self.bounds, strict=False))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Finding:
    """One answer that is further from the cold one than rounding goes."""

    way: str  # words of the pass
    turn: str
    distance: float
    bound: float
    again: int  # times of verdict.AGAIN
    requests: int  # of its session


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ProveRecord:
    schema: Literal[1] = 1
    time: str
    what: str  # tag or URL
    model: str
    vllm: str
    verdict: Literal["nothing found", "found", "cannot tell"]
    line: str
    turns: int  # answers that were compared
    seconds: float
    noise: float | None  # nats: median distance of two cold readings
    least: float | None  # the smallest difference that would have been told
    control: float | None  # what other text in the first third of a prompt does
    block: int | None
    drafted: int | None
    accepted: int | None
    passes: Annotated[tuple[PassResult, ...], Field(strict=False)]
    finding: Finding | None = None
    others: Annotated[int, Field(ge=0)] = 0  # further answers beyond their bound
    notes: Words = ()


def file_name(time: str) -> str:
    return time.replace(":", "").replace("-", "")


def keep(folder: Path, record: ProveRecord) -> Path:
    path = folder / f"{file_name(record.time)}.json"
    files.write_json(path, to_json(record))
    return path


def to_json(record: ProveRecord) -> dict[str, Any]:
    return dict(to_jsonable_python(record))
