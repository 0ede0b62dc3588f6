"""What a report says, as data: page and table are drawn from these alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sparkpin.releases.record import Release
from sparkpin.upgrade.bump_record import Bump

Kind = Literal["good", "bad", "unclear", "none"]
NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class ReportRow:
    """One line of evidence: a check, or a figure. note: what it is of."""

    name: str
    text: str
    kind: Kind = "none"
    note: str = ""


@dataclass(frozen=True)
class LimitBar:
    """A loss and its limit, both as shares of the limit: 0 is no loss, 1 all that may be lost."""

    name: str
    measured: str  # value and interval
    limit: str
    verdict: str
    kind: Kind
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class SpeedBar:
    """Output tokens a second of one request at a time, of the newest release of a stage. ceiling: what they could be
    at most."""

    stage: str
    rate: float
    kind: Kind = "good"  # "bad" where its release failed
    ceiling: float | None = None


@dataclass(frozen=True)
class ReportEvidence:
    title: str  # what was looked at
    kind: Kind
    text: str  # the verdict in a few words
    rows: tuple[ReportRow, ...] = ()
    hint: str = ""  # what makes it, where there is none
    where: str = ""  # the machine and the vLLM that its figures are from
    limits: tuple[LimitBar, ...] = ()


@dataclass(frozen=True)
class Speed:
    """Of a release; None where that was not measured. of_smoke: by the requests of its smoke test alone."""

    evidence: ReportEvidence
    rate: float | None = None  # output tokens a second of one request at a time, without the prefill
    first: float | None = None  # seconds to the first token
    ceiling: float | None = None  # of `rate`
    machine: str = ""
    of_smoke: bool = False


@dataclass(frozen=True)
class ReportCommand:
    text: str
    does: str


@dataclass(frozen=True)
class Item:
    """A release."""

    release: Release
    smoke: ReportEvidence
    quality: ReportEvidence
    speed: ReportEvidence
    notes: tuple[str, ...] = ()  # why it is kept, what the bump that made it decided, who else built this image
    command: str = ""  # prints what changed since the release before

    @property
    def evidence(self) -> tuple[ReportEvidence, ...]:
        return self.smoke, self.quality, self.speed


@dataclass(frozen=True)
class ReportMemory:
    """A plan, or why there is none."""

    headline: str
    kind: Kind
    shares: tuple[tuple[str, int, str], ...] = ()  # (what, bytes, how it is known)
    lines: tuple[str, ...] = ()
    needed: int = 0  # bytes, of those that
    free: int = 0  # are free on the machine, and
    total: int = 0  # that it has
    source: str = ""  # which machine
    users: str = ""  # how many requests fit at once, and of which length


@dataclass(frozen=True)
class RecipePart:
    """One recipe."""

    name: str
    description: str
    shown: Item  # the current release, else the newest
    current: bool
    promoted: str
    back: tuple[ReportCommand, ...]
    machine: str  # that its figures, else its image, were made on
    tiles: tuple[ReportRow, ...]
    bars: tuple[SpeedBar, ...]
    measured_by: str  # what the bars are from
    memory: ReportMemory
    items: tuple[Item, ...]  # from the newest to the oldest
    bumps: tuple[Bump, ...] = ()  # the same, those that were refused, too
    faults: tuple[str, ...] = ()  # records that cannot be read


@dataclass(frozen=True)
class Report:
    time: str  # ISO 8601, UTC
    version: str
    recipes: tuple[RecipePart, ...]
    faults: tuple[str, ...] = ()  # of recipes without a release that can be read

    @property
    def all_faults(self) -> tuple[str, ...]:
        return (*self.faults, *(fault for part in self.recipes for fault in part.faults))
