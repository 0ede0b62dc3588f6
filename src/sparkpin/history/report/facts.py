"""What a report says, as data: the page is drawn from these alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sparkpin.history.bump.record import Bump
from sparkpin.releases.record import Release

Kind = Literal["good", "bad", "unclear", "none"]
NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class ReportRow:
    """One line of evidence: a check, or a figure."""

    name: str
    text: str
    kind: Kind = "none"


@dataclass(frozen=True)
class Reading:
    """A measured number."""

    value: float  # as the record has it
    text: str  # rounded, with its unit
    note: str = ""  # a second figure beside it


@dataclass(frozen=True)
class TableRow:
    """What was measured at once. readings: one a column, None where there is none."""

    name: str
    readings: tuple[Reading | None, ...]
    kind: Kind = "none"


@dataclass(frozen=True)
class ReportTable:
    """columns: title, the rest of what it is. None of them is without a reading."""

    columns: tuple[tuple[str, str], ...]
    rows: tuple[TableRow, ...]


@dataclass(frozen=True)
class LimitBar:
    """A loss against its limit, both as shares of the limit: 0 is no loss, 1 all that may be lost."""

    name: str
    seen: str  # value and interval, with the unit
    limit: str
    verdict: str
    kind: Kind
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class ReportEvidence:
    title: str  # what was looked at
    kind: Kind
    text: str  # the verdict in a few words
    rows: tuple[ReportRow, ...] = ()
    hint: str = ""  # what makes it, where there is none
    where: str = ""  # the machine and the vLLM that its figures hold for
    table: ReportTable | None = None
    limits: tuple[LimitBar, ...] = ()


@dataclass(frozen=True)
class Changes:
    """Since another release."""

    since: str  # its tag, "" where there is none before
    why: str = ""  # what keeps the two from being compared, or why it is that one
    sections: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Title, lines: what differs of a kind as `invoke diff` writes it, texts of files left out."""
    command: str = ""  # prints all of it


@dataclass(frozen=True)
class Point:
    label: str
    value: float  # of a release, of a number of users or of a length
    kind: Kind = "good"  # "bad" where its release failed
    ceiling: float | None = None  # what the value could be at most


@dataclass(frozen=True)
class Series:
    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Chart:
    title: str
    unit: str
    form: Literal["line", "bars", "sweep"]  # over releases, one a stage, over numbers of users
    series: tuple[Series, ...]
    better: Literal["more", "less"] = "more"
    note: str = ""  # what else to know of it


@dataclass(frozen=True)
class Tile:
    """A figure of the release at a glance."""

    name: str
    text: str  # the figure, or that it was not measured
    note: str = ""
    kind: Kind = "none"


@dataclass(frozen=True)
class ReportCommand:
    text: str
    does: str


@dataclass(frozen=True)
class Item:
    """A release in the timeline."""

    release: Release
    smoke: ReportEvidence
    quality: ReportEvidence
    speed: ReportEvidence
    changes: Changes
    command: ReportCommand | None
    pinned: str = ""  # why it is kept
    bump: str = ""  # the verdict of the bump that made it
    confirmed: str = ""  # by whom else its digest was found

    @property
    def tag(self) -> str:
        return self.release.tag

    @property
    def evidence(self) -> tuple[ReportEvidence, ...]:
        return self.smoke, self.quality, self.speed


@dataclass(frozen=True)
class ReportMemory:
    """A plan, or why there is none."""

    headline: str
    kind: Kind
    shares: tuple[tuple[str, int, str, str], ...] = ()  # (what, bytes, how it is known, note)
    lines: tuple[str, ...] = ()
    needed: int = 0  # bytes, of those that
    free: int = 0  # are free on the machine, and
    total: int = 0  # that it has
    source: str = ""  # which machine
    most: int = 0  # requests that run at once, whatever fits
    users: tuple[tuple[int, int], ...] = ()  # tokens of prompt and answer -> requests of that length that fit at once


@dataclass(frozen=True)
class RecipePart:
    """One recipe."""

    name: str
    description: str
    shown: Item  # the release that memory and inputs are of: the current one, else the newest
    current: bool
    promoted: str
    back: tuple[ReportCommand, ...]
    machine: str  # that its figures, else its image, were made on
    tiles: tuple[Tile, ...]
    charts: tuple[Chart, ...]  # of the release that is shown, and of the newest of each stage
    histories: tuple[Chart, ...]
    apart: tuple[ReportRow, ...]  # what did not apply to the release, and why; what was not measured, and what does
    memory: ReportMemory
    inputs: tuple[ReportRow, ...]  # what it was made from
    sbom: tuple[tuple[str, int], ...]  # kind -> how many the SBOM lists; empty where there is none
    items: tuple[Item, ...]  # from the newest to the oldest
    bumps: tuple[Bump, ...] = ()  # the same, those that were refused, too
    faults: tuple[str, ...] = ()  # records that cannot be read


@dataclass(frozen=True)
class Report:
    made: str  # ISO 8601, UTC
    version: str
    recipes: tuple[RecipePart, ...]
    faults: tuple[str, ...] = ()  # of recipes without a release that can be read

    @property
    def all_faults(self) -> tuple[str, ...]:
        return (*self.faults, *(fault for part in self.recipes for fault in part.faults))
