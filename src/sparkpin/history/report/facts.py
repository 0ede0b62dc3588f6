"""What a report says, as data: the page is drawn from these alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["good", "bad", "unclear", "none"]
NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class ReportRow:
    """One line of evidence: a check, or a figure. figures: (value, what it is) of a line of several."""

    name: str
    text: str
    kind: Kind = "none"
    figures: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class ReportEvidence:
    """title: what was looked at; text: the verdict in a few words; hint: what makes it, where there is none; where: the
    machine and the vLLM that its figures hold for."""

    title: str
    kind: Kind
    text: str
    rows: tuple[ReportRow, ...] = ()
    hint: str = ""
    where: str = ""


@dataclass(frozen=True)
class ReportSection:
    """What differs of one kind. lines: as `invoke diff` writes them, texts of files left out."""

    title: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Changes:
    """Since another release. since: its tag, "" where there is none before; why: what keeps the two from being
    compared, or why it is that one; command: prints all of it."""

    since: str
    why: str = ""
    sections: tuple[ReportSection, ...] = ()
    command: str = ""


@dataclass(frozen=True)
class Point:
    """A value of a release, or of a number of users. kind: "bad" where its release failed."""

    label: str
    value: float
    kind: Kind = "good"


@dataclass(frozen=True)
class Series:
    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Chart:
    """form: "line" over releases, "bars" one a stage, "sweep" over numbers of users. better: more or less of it."""

    title: str
    unit: str
    form: Literal["line", "bars", "sweep"]
    series: tuple[Series, ...]
    better: Literal["more", "less"] = "more"


@dataclass(frozen=True)
class ReportCommand:
    text: str
    does: str


@dataclass(frozen=True)
class Item:
    """A release in the timeline. created: ISO 8601, UTC; size: bytes of its image; pinned: why it is kept."""

    tag: str
    name: str
    stage: str
    state: str
    created: str
    image: str
    size: int
    build_seconds: float
    smoke: ReportEvidence
    quality: ReportEvidence
    speed: ReportEvidence
    changes: Changes
    command: ReportCommand | None
    pinned: str = ""
    host: str = ""

    @property
    def evidence(self) -> tuple[ReportEvidence, ...]:
        return self.smoke, self.quality, self.speed


@dataclass(frozen=True)
class ReportMemory:
    """A plan, or why there is none. shares: (what, bytes, how it is known, note)."""

    headline: str
    kind: Kind
    shares: tuple[tuple[str, int, str, str], ...] = ()
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReportInputs:
    """rows: what it was made from; sbom: kind -> how many the SBOM lists; empty where there is none."""

    rows: tuple[ReportRow, ...]
    sbom: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class RecipePart:
    """One recipe. shown: the release that memory and inputs are of: the current one, else the newest.

    items: from the newest to the oldest. faults: records that cannot be read.
    """

    name: str
    description: str
    shown: Item
    current: bool
    promoted: str
    back: tuple[ReportCommand, ...]
    charts: tuple[Chart, ...]
    memory: ReportMemory
    inputs: ReportInputs
    items: tuple[Item, ...]
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """made: ISO 8601, UTC. faults: of recipes without a release that can be read."""

    made: str
    version: str
    recipes: tuple[RecipePart, ...]
    faults: tuple[str, ...] = ()

    @property
    def all_faults(self) -> tuple[str, ...]:
        return (*self.faults, *(fault for part in self.recipes for fault in part.faults))
