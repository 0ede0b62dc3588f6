"""What a benchmark found, as it is kept with a release, with the conditions under which it holds.

    releases/<recipe>/<stage>-<key12>/bench/<time>.json           a run; the last by name is the newest
    releases/<recipe>/<stage>-<key12>/bench/compare-<time>.json   a comparison, in the folders of both releases

Seconds are seconds, rates are tokens a second, memory is bytes. Readers take no lock: every file is complete or absent.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass
from pydantic_core import to_jsonable_python

from sparkpin.core import files
from sparkpin.core.paths import Paths
from sparkpin.host.fingerprint import Fingerprint
from sparkpin.releases.record import Release, Releases, read_as

FOLDER = "bench"
COMPARE = "compare-"
STRICT = ConfigDict(strict=True, extra="forbid")

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Figures = Annotated[tuple[float, ...], Field(strict=False)]
Words = Annotated[tuple[str, ...], Field(strict=False)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Cell:
    """One thing to measure: batches of as many requests as there are at a time."""

    name: str  # unique in a run
    kind: Literal["prompt", "sweep"]  # one of the five; random texts
    prompt: str = ""  # its text; "" of a sweep
    prompt_size: Count = 0  # tokens of each prompt; 0 until they are counted where it is a text
    response_size: Positive  # tokens at most
    concurrency: Positive = 1
    batches: Positive = 1
    ignore_eos: bool = False  # the model is kept from ending its answer before response_size


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Metric:
    values: Annotated[Figures, Field(min_length=1)]
    mean: float
    std: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Metric:
        return cls(values=tuple(values), mean=fmean(values), std=pstdev(values))

    @property
    def median(self) -> float:
        return median(self.values)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CellResult(Cell):
    """What came of a cell: a `BenchmarkRun` of llama-benchy, and more. Tokens are those that were delivered, by their
    ids, not parts of the stream. pp, tg: of prompts until their first token, and of answers after the first part of
    their streams; req: of each request, otherwise of each batch together; the two times in milliseconds."""

    context_size: Count = 0
    is_context_prefill_phase: bool = False
    pp_throughput: Metric
    pp_req_throughput: Metric
    tg_throughput: Metric | None  # None where all answers had one part, as below
    tg_req_throughput: Metric | None
    ttfr: Metric
    e2e_ttft: Metric
    seconds: Annotated[float, Field(gt=0)]  # of all batches, each from its first request to the end of its last answer
    completed: Count
    failed: Count
    output_tokens: Count  # of all answers
    later_parts: Count  # of their streams: all but the first of each
    later_tokens: Count  # in these
    drafted: Count | None = None  # tokens, as accepted
    accepted: Count | None = None
    accepted_by_position: Figures = ()  # share of the drafts
    others: int | None = None  # tokens that the server made meanwhile for somebody else, None where it does not count

    @property
    def output_rate(self) -> float:
        """Tokens a second of all answers, prefill included."""
        return self.output_tokens / self.seconds

    @property
    def decode_rate(self) -> float | None:
        """Of one request, the median."""
        return self.tg_req_throughput.median if self.tg_req_throughput else None

    @property
    def ttft(self) -> float:
        """Milliseconds to the first token, the median."""
        return self.e2e_ttft.median

    @property
    def acceptance(self) -> float | None:
        """Share of the drafted tokens that the model would have said itself."""
        return self.accepted / self.drafted if self.drafted and self.accepted is not None else None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Conditions:
    """Where and with what the figures hold."""

    release: str
    image: str
    host: Fingerprint
    vllm: str
    argv: Words
    env: dict[str, str]
    server: Literal["started", "served"]  # for the run, or already, and others may have asked it, too


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BenchRecord:
    """A run: a `BenchmarkReport` of llama-benchy 0.4, and more.

    memory: bytes after the last cell, of the container without its page cache; None where nothing reports it. slowed:
    what held the GPUs' clocks down after some cell. ceiling: tokens a second that the decode of one of the five prompts
    could have; None where the memory's bandwidth is unknown.
    """

    schema: Literal[1] = 1
    version: str = "sparkpin"
    timestamp: str
    latency_mode: str = "none"
    latency_ms: float = 0.0
    model: str
    prefix_caching_enabled: bool = False  # that prompts were cached on purpose
    max_concurrency: Count
    benchmarks: Annotated[tuple[CellResult, ...], Field(strict=False)]
    conditions: Conditions
    start_seconds: float | None = None  # until it answered
    memory: Count | None = None
    slowed: Words = ()
    ceiling: float | None = None

    def of_kind(self, kind: str) -> tuple[CellResult, ...]:
        return tuple(row for row in self.benchmarks if row.kind == kind)

    @property
    def decode_rate(self) -> float | None:
        """One figure for a chart: the median of the five prompts, one request at a time."""
        rates = [row.decode_rate for row in self.of_kind("prompt") if row.decode_rate]
        return median(rates) if rates else None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Ratio:
    """B's figure by A's. a, b: of each round; low, high: ends of the 95 % interval, None with one round only."""

    cell: str
    metric: str
    a: Figures
    b: Figures
    ratio: float  # geometric mean of the rounds' ratios
    low: float | None
    high: float | None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Comparison:
    schema: Literal[1] = 1
    timestamp: str
    a: Conditions
    b: Conditions
    order: str  # who was measured when, such as "ABBA"
    failed: Count = 0  # requests of both that were not answered, so that the others had less beside them
    ratios: Annotated[tuple[Ratio, ...], Field(strict=False)]


def folder(paths: Paths, release: Release) -> Path:
    return Releases(paths).evidence(release) / FOLDER


def save(paths: Paths, release: Release, record: BenchRecord | Comparison) -> Path:
    prefix = COMPARE if isinstance(record, Comparison) else ""
    time = re.sub("[:-]", "", record.timestamp)  # colons are no part of a name that every file system takes
    path = folder(paths, release) / f"{prefix}{time}.json"
    files.write_json(path, to_json(record))
    return path


def to_json(value: BenchRecord | Comparison) -> dict[str, Any]:
    return dict(to_jsonable_python(value))


def read(path: Path) -> BenchRecord:
    """ManifestError for a file that is damaged or newer than this; FileNotFoundError passes through."""
    return read_as(path, TypeAdapter(BenchRecord), next_step=f"move {path} away: invoke bench writes another")


def history(paths: Paths, release: Release) -> tuple[BenchRecord, ...]:
    """The runs of a release, from the oldest to the newest."""
    return tuple(map(read, sorted(folder(paths, release).glob("[0-9]*.json"))))


def newest(paths: Paths, release: Release) -> BenchRecord | None:
    found = sorted(folder(paths, release).glob("[0-9]*.json"))
    return read(found[-1]) if found else None
