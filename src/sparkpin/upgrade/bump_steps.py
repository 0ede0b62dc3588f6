"""The steps that newer versions have to pass, each compared with the current release."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkpin.build.make import at_work, build_releases, fetch_missing
from sparkpin.build.pair import Pairing
from sparkpin.core import errors, terminal
from sparkpin.core.errors import BumpError, InspectionError, QualityError, SmokeError, clipped
from sparkpin.core.paths import Paths
from sparkpin.host.engine import Engine
from sparkpin.measure.bench.record import Comparison, Ratio
from sparkpin.measure.bench.run import ALL
from sparkpin.measure.bench.text import UNITS
from sparkpin.measure.own_server import own_server
from sparkpin.pins.schema import Quality
from sparkpin.releases import quality_allowance, quality_record
from sparkpin.releases.quality_record import QualityRecord
from sparkpin.releases.record import Release, Releases
from sparkpin.serve.proxy import before
from sparkpin.smoke.inspect.run import inspect
from sparkpin.smoke.run import run_smoke
from sparkpin.smoke.server import ANSWER_SECONDS
from sparkpin.upgrade.bisect_search import Judge, Trial

FAILURES = (
    *(errors.BuildError, errors.CheckpointError, errors.IntegrityError, errors.ManifestError),
    *(BumpError, InspectionError, QualityError, SmokeError),
)
"""What is a verdict on newer versions. All else (no network, disk, engine) ends the run, which can go on later."""
ALLOWED = Quality(kl=0.007, continued_kl=0.01, top1=0.96, perplexity=1.015, tool_calls=0.05, needles=0.1)
"""What newer versions of the same release may cost: reading, what another kernel may (docs/quality.md, stage mtp)."""
SLOWER = 0.03
"""Share of the speed: a smaller loss is ignored, however sure it is."""
HIGHER = ("output_rate", "decode_rate")  # better; of the other metrics lower is


@dataclass(frozen=True)
class Commands:
    """What the other commands do. Each gets the project on the side."""

    attest: Callable[[Paths, Release], object]
    smoke: Callable[[Paths, tuple[Release, ...]], object]  # keeps the results with the releases
    quality: Callable[[Paths, Engine, Release, Release], QualityRecord]  # of a release and its reference
    speed: Callable[[Paths, Engine, Release, Release, bool], Comparison]  # of A and B; whether it is kept
    promote: Callable[[str], object]


@dataclass(frozen=True)
class Candidate:
    """What is tried against the current release. paths: of the project on the side; pairings: of the chain of images,
    of which the last is the one that is tried.

    Each step returns its finding, and raises one of FAILURES where it fails. With `record` the result is kept with the
    release; a combination of a search has no record to keep it with.
    """

    paths: Paths
    engine: Engine
    current: Release
    pairings: tuple[Pairing, ...]
    commands: Commands

    @property
    def release(self) -> Release:
        return Releases(self.paths).get(self.pairings[-1].tag)

    def run(self, step: str) -> str:
        return self.build() if step == "build" else getattr(self, step)(self.release, record=True)

    def build(self) -> str:
        with at_work(self.paths) as engine:
            fetch_missing(self.paths, engine, self.pairings)
            for release in build_releases(self.paths, engine, self.pairings):
                self.commands.attest(self.paths, release)
        return f"{terminal.count(len(self.pairings), 'image')}, {terminal.size(release.size)}"

    def inspect(self, release: Release, *, record: bool) -> str:
        """InspectionError for a fault that the current release does not have."""
        results = [inspect(self.paths, self.engine, one) for one in (self.current, release)]
        known = {(row.rule, row.subject, row.what) for row in results[0].errors}
        if more := [row for row in results[1].errors if (row.rule, row.subject, row.what) not in known]:
            raise InspectionError(clipped("; ".join(f"{row.subject}: {row.text}" for row in more)))
        return results[1].verdict

    def smoke(self, release: Release, *, record: bool) -> str:
        """The stage below it first, which its answers are compared with."""
        records = Releases(self.paths)
        tags = [pairing.tag for pairing in self.pairings[-2:]]
        if not record:
            return self.smoke_again(release, [records.get(tag) for tag in tags])
        self.commands.smoke(self.paths, tuple(one for one in map(records.get, tags) if not one.smoke_passed))
        for one in map(records.get, tags):
            if not one.smoke_passed:
                raise SmokeError(f"{one.stage}: {clipped('; '.join(one.smoke_failures or [one.smoke_text]))}")
        return records.get(release.tag).smoke_text

    def smoke_again(self, release: Release, smoked: Sequence[Release]) -> str:
        """Only what failed of those that were smoked."""
        checks = [check for one in smoked for check in (one.smoke or {}).get("checks", ()) if not check["passed"]]
        failed = {check["name"] for check in checks}
        names = tuple(name for name in release.demands.checks if name in failed)
        asked = dataclasses.replace(release, demands=release.demands.model_copy(update={"checks": names}))
        serving = own_server(self.paths, self.engine, asked, limit=ANSWER_SECONDS)
        evidence = run_smoke(self.paths, self.engine, asked, before(self.paths, serving))
        if bad := evidence.failures:
            raise SmokeError(clipped(bad[0]))
        return "passed"

    def quality(self, release: Release, *, record: bool) -> str:
        found = self.commands.quality(self.paths, self.engine, release, self.current)
        if record:
            quality_record.save(self.paths, release, self.current, found)
        lines = quality_allowance.judge(found.overall, found.skills, ALLOWED)
        if more := [quality_allowance.line(one) for one in lines if one.kept == "more"]:
            raise QualityError("; ".join(more))
        return ", ".join(f"{one.name} {one.seen.text()}" for one in lines)

    def speed(self, release: Release, *, record: bool) -> str:
        return judge_speed(self.commands.speed(self.paths, self.engine, self.current, release, record))

    def judge(self, step: str) -> Judge:
        """How a search compares a combination of changes with the current release."""

        def judge(release: Release, log: Path) -> Trial:
            try:
                return Trial(verdict="good", how=getattr(self, step)(release, record=False))
            except FAILURES as error:
                log.write_text(f"{error}\n")
                return Trial(verdict="bad", how=error.message.splitlines()[0])

        return judge


def judge_speed(comparison: Comparison) -> str:
    """BumpError where requests failed, or a 95 % interval lies wholly beyond SLOWER."""
    together: Sequence[Ratio] = [row for row in comparison.ratios if row.cell == ALL] or comparison.ratios
    if comparison.failed:
        raise BumpError(f"{terminal.count(comparison.failed, 'request')} of the benchmark were not answered")
    verdicts = [slower(row) for row in together]
    if slow := [ratio_text(row) for row, one in zip(together, verdicts, strict=True) if one == "more"]:
        raise BumpError(f"slower: {', '.join(slow)}")
    return ", ".join(map(ratio_text, together)) + (
        f"; {SLOWER:.0%} slower cannot be ruled out" * ("unclear" in verdicts)
    )


def slower(row: Ratio) -> quality_record.Kept:
    """Against SLOWER. One round has no interval, and is inconclusive."""
    least = row.metric in HIGHER
    figure = quality_record.Figure(value=row.ratio, low=row.low or 0.0, high=row.high or math.inf)
    return quality_allowance.verdict_of(figure, 1 - SLOWER if least else 1 / (1 - SLOWER), least=least, room=0)


def ratio_text(row: Ratio) -> str:
    interval = "" if row.low is None else f" [{row.low:.3f}, {row.high:.3f}]"
    return f"{UNITS[row.metric]} x{row.ratio:.3f}{interval}"
