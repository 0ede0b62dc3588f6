"""What a benchmark found, as it is kept with a release: whole, with the conditions under which it holds.

    releases/<recipe>/<stage>-<key12>/bench/<time>.json           a run; the last by name is the newest
    releases/<recipe>/<stage>-<key12>/bench/compare-<time>.json   a comparison, in the folders of both releases

Seconds are seconds, rates are tokens a second, memory is bytes. Readers take no lock: every file is whole or absent.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass
from pydantic_core import to_jsonable_python

from sparkpin.core import files
from sparkpin.core.paths import Paths
from sparkpin.host.fingerprint import Fingerprint
from sparkpin.releases.record import Release, Releases, read_as

FOLDER = "bench"
COMPARE = "compare-"
T = TypeVar("T")
STRICT = ConfigDict(strict=True, extra="forbid")

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Shares = Annotated[tuple[float, ...], Field(strict=False)]
Words = Annotated[tuple[str, ...], Field(strict=False)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Cell:
    """One thing to measure."""

    name: str  # unique in a run
    kind: Literal["prompt", "sweep"]  # one of the five, asked twice; random texts after a warm-up
    prompt: str = ""  # its text; "" of a sweep
    input_tokens: Count = 0  # of each prompt of a sweep, 0 where the prompt says it
    output_tokens: Positive  # at most
    concurrency: Positive = 1  # requests at a time
    requests: Positive = 1
    whole: bool = False  # the model is kept from ending its answer before output_tokens


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Spread:
    p50: float
    p95: float


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CellResult:
    """What came of a cell, in tokens as the server counts them (`usage`), not in parts of the stream."""

    cell: Cell
    seconds: float  # from the first request to the end of the last answer
    completed: Count
    failed: Count
    prompt_tokens: Count  # of all answers, as output_tokens
    output_tokens: Count
    parts: Count  # of the streams that they came in, 0 where each was one
    output_rate: float  # output_tokens a second, prefill included
    decode_rate: float | None  # of one user, after the first token, the median
    ttft: Spread | None  # time to the first token
    token: Spread | None  # between two tokens: each gap by the tokens of a part, on average of its own stream
    prefill_rate: float | None  # prompt tokens until the first token, one user at a time, the median
    drafted: Count | None = None  # tokens, as accepted
    accepted: Count | None = None
    accepted_by_position: Shares = ()  # of the drafts
    others: int | None = None  # tokens that the server made meanwhile for somebody else, None where it does not tell

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
    """What the start took until it answered."""

    seconds: float
    began: dict[str, float]  # phase of `startup.STAGES` -> seconds since the start


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PeakMemory:
    """The most bytes that were seen after a cell; None where nobody tells."""

    container: Count | None  # of the server's, without its page cache
    gpu: Count | None  # of all programs on the GPUs, as nvidia-smi tells


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Ceiling:
    bandwidth: float  # bytes a second, as stated
    context: Count  # tokens in the cache
    accepted: float  # the measured share of the drafts
    rate: float  # tokens a second that one user's decode could have
    fraction: float  # of it that the five prompts' median has


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Conditions:
    """Where and with what the figures hold."""

    release: str
    image: str
    host: Fingerprint
    vllm: str  # the server's version
    tool: str  # what made the load
    argv: Words
    env: dict[str, str]
    server: Literal["started", "served"]  # for the run, or already, and others may have asked it, too


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BenchRecord:
    """A run."""

    schema: Literal[1] = 1
    time: str
    conditions: Conditions
    cells: Annotated[tuple[CellResult, ...], Field(strict=False)]
    start: Start | None = None
    memory: PeakMemory | None = None
    slowed: Words = ()  # what held the GPUs' clocks down after some cell
    ceiling: Ceiling | None = None

    def of_kind(self, kind: str) -> tuple[CellResult, ...]:
        return tuple(row for row in self.cells if row.cell.kind == kind)

    @property
    def decode_rate(self) -> float | None:
        """One figure for a chart: the median of the five prompts, one user."""
        rates = [row.decode_rate for row in self.of_kind("prompt") if row.decode_rate]
        return median(rates) if rates else None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Ratio:
    """B's figure by A's."""

    cell: str
    metric: str
    a: Shares  # one of each round, as b
    b: Shares
    ratio: float  # geometric mean of the rounds' ratios
    low: float | None  # ends of its 95 % interval, None with one round only
    high: float | None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Comparison:
    schema: Literal[1] = 1
    time: str
    a: Conditions
    b: Conditions
    order: str  # who was measured when, such as "ABBA"
    restarted: bool  # whether each turn had a server of its own
    failed: Count = 0  # requests of both that were not answered, so that the others had less beside them
    ratios: Annotated[tuple[Ratio, ...], Field(strict=False)]
    interval: str


def folder(paths: Paths, release: Release) -> Path:
    return Releases(paths).evidence(release) / FOLDER


def file_name(time: str) -> str:
    """Of a record. Colons of an ISO time are no part of a name that everybody's file system takes."""
    return f"{time.replace(':', '').replace('-', '')}.json"


def keep(paths: Paths, release: Release, record: BenchRecord) -> Path:
    path = folder(paths, release) / file_name(record.time)
    files.write_json(path, to_json(record))
    return path


def to_json(value: BenchRecord | Comparison) -> dict[str, Any]:
    return dict(to_jsonable_python(value))


def read(path: Path) -> BenchRecord:
    return read_of(path, BenchRecord)


def read_of(path: Path, kind: type[T]) -> T:
    """ManifestError for a file that is damaged or newer than this; FileNotFoundError passes through."""
    return read_as(path, TypeAdapter(kind), next_step=f"move {path} away: invoke bench writes another")


def history(paths: Paths, release: Release) -> tuple[BenchRecord, ...]:
    """The runs of a release, from the oldest to the newest."""
    return tuple(map(read, _finished(folder(paths, release))))


def newest(paths: Paths, release: Release) -> BenchRecord | None:
    found = _finished(folder(paths, release))
    return read(found[-1]) if found else None


def comparisons(paths: Paths, release: Release) -> tuple[Comparison, ...]:
    """Those that a release took part in, from the oldest to the newest."""
    found = sorted(folder(paths, release).glob(f"{COMPARE}*.json"))
    return tuple(read_of(path, Comparison) for path in found)


def _finished(into: Path) -> list[Path]:
    return sorted(path for path in into.glob("*.json") if path.name[0].isdigit())
