"""What a comparison of two releases has found. One file for each reference:

releases/<recipe>/<stage>-<key12>/quality/<recipe>-<stage>-<key12 of the reference>.json   a `QualityRecord`
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass

from sparkpin.core.files import write_json
from sparkpin.core.paths import Paths
from sparkpin.host.fingerprint import Fingerprint
from sparkpin.releases.record import Release, Releases, read_as

SCHEMA: Literal[1] = 1
FOLDER = "quality"
KEY_DIGITS = 16  # of a release's key, with which the names in SPARKPIN_CACHE/quality begin
STRICT = ConfigDict(strict=True, extra="forbid", defer_build=True)

Kept = Literal["within", "unclear", "more"]
"""Of what a stage may cost. within: the measured value is; more: the whole interval is beyond; unclear: it cannot be
told, for the interval holds the limit, and the value is beyond it or the interval wider than all that may be lost.
"""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Figure:
    """A measured number and its 95 % interval: paired over texts (`statistics`), by a formula for questions."""

    value: float
    low: float
    high: float

    def text(self, form: str = ".4g") -> str:
        return f"{self.value:{form}} [{self.low:{form}}, {self.high:{form}}]"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Texts:
    """Log-probabilities over the texts of one kind, or of all ("all"). P is the reference, Q the release.

    texts, tokens: how many were compared. kl: KL(P || Q) in nats a token, a lower bound (`distance`); top1: share of
    the positions where both have the same likeliest token; perplexity_reference, perplexity: of each; ratio: Q's by
    P's.
    All of these are teacher-forced: both read the same tokens.
    continued: tokens of the greedy continuations that were compared, up to and with the first that differs;
    continued_kl: KL there, as each of them decodes; continued_same: share of the continued tokens that came before any
    that differs.
    """

    kind: str
    texts: int
    tokens: int
    kl: Figure
    top1: Figure
    perplexity_reference: float
    perplexity: float
    ratio: Figure
    continued: int
    continued_kl: Figure
    continued_same: Figure


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Skill:
    """Questions with a right answer, asked of both. name: "tool calls" or "needles <tokens of the prompt>".

    reference, release: how many of `asked` each has right; lost: share that the release lost (negative: won);
    failures: `question: what was wrong`, of those the release has wrong and the reference right.
    """

    name: str
    asked: int
    reference: int
    release: int
    lost: Figure
    failures: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Judged:
    """One line of a stage's allowance. name: its key in `quality` of stages/*.yaml; limit: its value there."""

    name: str
    limit: float
    seen: Figure
    kept: Kept


@dataclass(frozen=True, kw_only=True, config=STRICT)
class QualityRecord:
    """release, reference: tags. role: the reference is the release's parent stage, or was named by a person.

    time: ISO 8601, UTC. seconds: that the measuring of both took, the starts of their servers aside. vllm: what
    each server said it is. corpus: SHA-256 of texts and questions; top_k: log-probabilities asked for at each position;
    quick: few texts, few questions.
    texts: "all" first, then each kind. judged: against the allowance of the release's stage as it was then; empty where
    that declares none, or for a named reference. notes: what could not be asked, and why.
    """

    schema: Literal[1] = SCHEMA
    release: str
    reference: str
    role: Literal["parent", "named"]
    time: str
    seconds: float
    vllm_release: str
    vllm_reference: str
    host: Fingerprint
    corpus: str
    top_k: int
    quick: bool = False
    texts: tuple[Texts, ...]
    skills: tuple[Skill, ...]
    judged: tuple[Judged, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def overall(self) -> Texts:
        return self.texts[0]

    @property
    def more(self) -> tuple[Judged, ...]:
        return tuple(one for one in self.judged if one.kept == "more")


RECORD = TypeAdapter(QualityRecord)


def folder_of(paths: Paths, release: Release) -> Path:
    return Releases(paths).evidence(release) / FOLDER


def to_json(record: QualityRecord) -> dict[str, Any]:
    value: dict[str, Any] = RECORD.dump_python(record, mode="json")
    return value


def save(paths: Paths, release: Release, reference: Release, record: QualityRecord) -> Path:
    """Where the same two were compared before, that record goes."""
    name = f"{reference.recipe}-{reference.name}{'-quick' if record.quick else ''}.json"
    path = folder_of(paths, release) / name
    with Releases(paths).locked(release.recipe):
        write_json(path, to_json(record))
    return path


def records_of(paths: Paths, release: Release) -> tuple[QualityRecord, ...]:
    """From the oldest to the newest. ManifestError for the first that is damaged."""
    files = sorted(folder_of(paths, release).glob("*.json"))
    found = [read_as(path, RECORD, next_step=f"rm {path}, then invoke quality") for path in files]
    return tuple(sorted(found, key=lambda record: record.time))


def against_parent(paths: Paths, release: Release) -> QualityRecord | None:
    """The newest comparison with the parent stage, which `promote` goes by; a quick one only where no other is."""
    found = [one for one in records_of(paths, release) if one.role == "parent"]
    return max(found, key=lambda one: (not one.quick, one.time), default=None)
