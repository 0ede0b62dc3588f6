"""What a benchmark found, as it is kept with a release: whole, with the conditions under which it holds.

    releases/<recipe>/<stage>-<key12>/bench/<time>.json           a finished run; the last by name is the newest
    releases/<recipe>/<stage>-<key12>/bench/compare-<time>.json   a comparison, in the folders of both releases
    releases/<recipe>/<stage>-<key12>/bench/unfinished.json       the cells of a run that was broken off

Seconds are seconds, rates are tokens a second, memory is bytes. Readers take no lock: every file is whole or absent.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass

from sparkpin.core import files
from sparkpin.core.paths import Paths
from sparkpin.host.fingerprint import Fingerprint
from sparkpin.releases.record import Release, Releases, read_as

FOLDER = "bench"
UNFINISHED = "unfinished.json"
COMPARE = "compare-"
T = TypeVar("T")
STRICT = ConfigDict(strict=True, extra="forbid")

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Shares = Annotated[tuple[float, ...], Field(strict=False)]
Words = Annotated[tuple[str, ...], Field(strict=False)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Cell:
    """One thing to measure. name: unique in a run. kind: "prompt", one of the five, asked twice, the second time
    counted; "sweep", random texts after a warm-up. prompt: the text of the first, "" of the other; input_tokens: of
    each prompt of a sweep, 0 where the prompt says it; output_tokens: at most; concurrency: requests at a time.
    """

    name: str
    kind: Literal["prompt", "sweep"]
    prompt: str = ""
    input_tokens: Count = 0
    output_tokens: Positive
    concurrency: Positive = 1
    requests: Positive = 1
    whole: bool = False
    """Whether the model is kept from ending its answer before output_tokens."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Spread:
    p50: float
    p95: float


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CellResult:
    """What came of a cell, in tokens as the server counts them (`usage`), not in parts of the stream.

    seconds: from the first request to the end of the last answer; prompt_tokens, output_tokens: of all answers;
    parts: of the streams that they came in, 0 where each was one. output_rate: output_tokens a second, prefill
    included; decode_rate: of one user, after the first token, the median; first_rate: output_rate of the run that does
    not count; ttft: time to the first token; gap: between two parts of a stream; token: between two tokens, each gap
    divided by the tokens of a part, on average of its own stream; prefill_rate: prompt tokens until the first token,
    one user at a time, the median. drafted, accepted: tokens; accepted_by_position: share of the drafts.
    joined: answers whose parts a busy machine joined, so that decode_rate, gap and token are of the others;
    others: tokens that the server made meanwhile for somebody else, None where it does not tell.
    """

    cell: Cell
    seconds: float
    completed: Count
    failed: Count
    prompt_tokens: Count
    output_tokens: Count
    parts: Count
    output_rate: float
    decode_rate: float | None
    first_rate: float | None = None
    ttft: Spread | None
    gap: Spread | None
    token: Spread | None
    prefill_rate: float | None
    drafted: Count | None = None
    accepted: Count | None = None
    accepted_by_position: Shares = ()
    joined: Count = 0
    others: int | None = None

    @property
    def acceptance(self) -> float | None:
        """Share of the drafted tokens that the model would have said itself."""
        return self.accepted / self.drafted if self.drafted and self.accepted is not None else None

    @property
    def tokens_a_part(self) -> float | None:
        """What a tool that counts parts is wrong by. The first part of a stream is left out: it ends the prefill."""
        made = self.output_tokens - self.completed
        return made / self.parts if self.parts and made > 0 else None

    @property
    def ended_early(self) -> bool:
        return self.output_tokens < self.completed * self.cell.output_tokens


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Start:
    """What the start took until it answered. began: phase of `serving.startup.STAGES` -> seconds since the start."""

    seconds: float
    began: dict[str, float]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PeakMemory:
    """The most that was seen after a cell. container: bytes of the server's container without its page cache; gpu: of
    all programs on the GPUs, as nvidia-smi tells; None where nobody tells."""

    container: Count | None
    gpu: Count | None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Ceiling:
    """bandwidth: bytes a second, as stated; context: tokens in the cache; accepted: the measured share of the drafts;
    rate: tokens a second that one user's decode could have; fraction: of it that the five prompts' median has."""

    bandwidth: float
    context: Count
    accepted: float
    rate: float
    fraction: float


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Conditions:
    """Where and with what the figures hold. tool: what made the load; vllm: the server's version; server: "started" for
    the run, or "served" already, which others may have asked, too."""

    release: str
    image: str
    host: Fingerprint
    vllm: str
    tool: str
    argv: Words
    env: dict[str, str]
    server: Literal["started", "served"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BenchRecord:
    """A run. sessions: more than one where it was resumed; start, memory: of the last. slowed: what held the GPUs'
    clocks down after some cell, in words."""

    schema: Literal[1] = 1
    time: str
    conditions: Conditions
    cells: Annotated[tuple[CellResult, ...], Field(strict=False)]
    planned: Count
    sessions: Positive = 1
    start: Start | None = None
    memory: PeakMemory | None = None
    slowed: Words = ()
    ceiling: Ceiling | None = None

    @property
    def finished(self) -> bool:
        return len(self.cells) == self.planned

    def of_kind(self, kind: str) -> tuple[CellResult, ...]:
        return tuple(row for row in self.cells if row.cell.kind == kind)

    @property
    def decode_rate(self) -> float | None:
        """One figure for a chart: the median of the five prompts, one user."""
        rates = [row.decode_rate for row in self.of_kind("prompt") if row.decode_rate]
        return median(rates) if rates else None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Ratio:
    """B's figure by A's. a, b: one of each round; ratio: geometric mean of the rounds' ratios; low, high: ends of its
    95 % interval, None with one round only."""

    cell: str
    metric: str
    a: Shares
    b: Shares
    ratio: float
    low: float | None
    high: float | None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Comparison:
    """order: who was measured when, such as "ABBA"; restarted: whether each turn had a server of its own; failed:
    requests of both that were not answered, so that the others had less beside them."""

    schema: Literal[1] = 1
    time: str
    a: Conditions
    b: Conditions
    order: str
    restarted: bool
    failed: Count = 0
    ratios: Annotated[tuple[Ratio, ...], Field(strict=False)]
    interval: str


RECORD = TypeAdapter(BenchRecord)
COMPARISON = TypeAdapter(Comparison)


def folder(paths: Paths, release: Release) -> Path:
    return Releases(paths).evidence(release) / FOLDER


def file_name(time: str) -> str:
    """Of a record. Colons of an ISO time are no part of a name that everybody's file system takes."""
    return f"{time.replace(':', '').replace('-', '')}.json"


def keep(paths: Paths, release: Release, record: BenchRecord) -> Path:
    """Write a run: under its time when it is finished, else as the one that may be resumed."""
    into = folder(paths, release)
    path = into / (file_name(record.time) if record.finished else UNFINISHED)
    files.write_json(path, to_json(record))
    if record.finished:
        (into / UNFINISHED).unlink(missing_ok=True)
    return path


def to_json(value: BenchRecord | Comparison) -> dict[str, Any]:
    adapter: TypeAdapter[Any] = RECORD if isinstance(value, BenchRecord) else COMPARISON
    dumped: dict[str, Any] = adapter.dump_python(value, mode="json")
    return dumped


def read(path: Path) -> BenchRecord:
    return _read(path, RECORD)


def read_comparison(path: Path) -> Comparison:
    return _read(path, COMPARISON)


def _read(path: Path, adapter: TypeAdapter[T]) -> T:
    """ManifestError for a file that is damaged or newer than this; FileNotFoundError passes through."""
    return read_as(path, adapter, next_step=f"move {path} away: invoke bench writes another")


def history(paths: Paths, release: Release) -> tuple[BenchRecord, ...]:
    """The finished runs of a release, from the oldest to the newest."""
    return tuple(map(read, _finished(folder(paths, release))))


def newest(paths: Paths, release: Release) -> BenchRecord | None:
    found = list(_finished(folder(paths, release)))
    return read(found[-1]) if found else None


def unfinished(paths: Paths, release: Release) -> BenchRecord | None:
    try:
        return read(folder(paths, release) / UNFINISHED)
    except FileNotFoundError:
        return None


def comparisons(paths: Paths, release: Release) -> tuple[Comparison, ...]:
    """Those that a release took part in, from the oldest to the newest."""
    return tuple(map(read_comparison, sorted(folder(paths, release).glob(f"{COMPARE}*.json"))))


def _finished(into: Path) -> Iterator[Path]:
    yield from sorted(path for path in into.glob("*.json") if path.name[0].isdigit())
