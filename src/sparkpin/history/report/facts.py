"""What a report says, as data: the page is drawn from these alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sparkpin.releases.record import Release

Kind = Literal["good", "bad", "unclear", "none"]
NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class ReportRow:
    """One line of evidence: a check, or a figure."""

    name: str
    text: str
    kind: Kind = "none"
    figures: tuple[tuple[str, str], ...] = ()  # (value, what it is) of a line of several


@dataclass(frozen=True)
class ReportEvidence:
    title: str  # what was looked at
    kind: Kind
    text: str  # the verdict in a few words
    rows: tuple[ReportRow, ...] = ()
    hint: str = ""  # what makes it, where there is none
    where: str = ""  # the machine and the vLLM that its figures hold for


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
    value: float  # of a release, or of a number of users
    kind: Kind = "good"  # "bad" where its release failed


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


@dataclass(frozen=True)
class RecipePart:
    """One recipe."""

    name: str
    description: str
    shown: Item  # the release that memory and inputs are of: the current one, else the newest
    current: bool
    promoted: str
    back: tuple[ReportCommand, ...]
    charts: tuple[Chart, ...]
    memory: ReportMemory
    inputs: tuple[ReportRow, ...]  # what it was made from
    sbom: tuple[tuple[str, int], ...]  # kind -> how many the SBOM lists; empty where there is none
    items: tuple[Item, ...]  # from the newest to the oldest
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
