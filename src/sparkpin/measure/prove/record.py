"""What a run found, as it is kept.

    <folder>/<time>.json          a finished run
    <folder>/<time>-session.json  what was sent, where an answer differed: from it others can send it again

The folder is `prove` of the release's evidence, or of SPARKPIN_HOME, with the endpoint's host and port.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from sparkpin.core import files

Verdict = Literal["nothing found", "found", "cannot tell"]


@dataclass(frozen=True)
class WayResult:
    """distances: nats, of each answer from the cold one; bounds: from which on each is asked with other words.

    hits: prompt tokens that came from the cache, None where nobody tells; asked: prompt tokens of all its requests.
    """

    name: str
    words: str
    distances: tuple[float, ...]
    bounds: tuple[float, ...]
    hits: int | None
    asked: int
    seconds: float

    @property
    def beyond(self) -> int:
        return sum(far > bound for far, bound in zip(self.distances, self.bounds, strict=False))


@dataclass(frozen=True)
class Finding:
    """One answer that is further from the cold one than rounding goes. bound: nats, of NOISE readings of like prompts
    the furthest, or the least that counts; shown: of `tries` with other words how many were beyond; requests: that led
    to it.
    """

    name: str
    way: str
    distance: float
    bound: float
    shown: int
    tries: int
    requests: int


@dataclass(frozen=True, kw_only=True)
class ProveRecord:
    """noise: nats, the furthest of the cold readings at once; least: the smallest difference that would have been seen;
    control: what other text in the first third of a prompt does, the median; planted: how many of the faults that were
    planted into vLLM would show here."""

    schema: Literal[2] = 2
    time: str
    what: str  # tag or URL
    model: str
    vllm: str
    verdict: Verdict
    line: str
    noise: float | None
    least: float
    control: float
    planted: int
    drafted: int
    ways: tuple[WayResult, ...]
    finding: Finding | None = None
    notes: tuple[str, ...] = ()


def path_of(folder: Path, time: str, kind: str = "") -> Path:
    return folder / f"{time.replace(':', '').replace('-', '')}{kind}.json"


def save(folder: Path, record: ProveRecord) -> Path:
    path = path_of(folder, record.time)
    files.write_json(path, asdict(record))
    return path
