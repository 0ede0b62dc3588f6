"""What the releases of a recipe have lost, beside the limits of their stages: from their records, no server."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from sparkpin.core import terminal
from sparkpin.core.errors import InputError, ManifestError
from sparkpin.core.paths import Paths
from sparkpin.pins import manifests
from sparkpin.pins.schema import Quality, Stage
from sparkpin.releases import quality_allowance
from sparkpin.releases.quality_record import Figure, Kept, QualityRecord, against_parent
from sparkpin.releases.record import Releases

COLUMNS = ("stage", "limit", "allowed", "newest", "95 % interval", "verdict", "releases", "would keep all")
STEP = 2  # digits that count of a limit


@dataclass(frozen=True)
class LimitRow:
    """A limit of a stage and what its releases lost."""

    stage: str
    limit: str
    allowed: float | None  # None where the stage sets none
    newest: Figure | None = None  # of the newest release that was measured
    verdict: Kept | None = None  # of it
    releases: int = 0  # how many were measured
    would_keep_all: float | None = None  # as a limit: what every interval of the releases keeps

    @property
    def cells(self) -> tuple[object, ...]:
        return (
            self.stage,
            self.limit,
            "-" if self.allowed is None else f"{self.allowed:g}",
            f"{self.newest.value:.4g}" if self.newest else "-",
            f"{self.newest.low:.4g} .. {self.newest.high:.4g}" if self.newest else "-",
            "" if self.verdict is None else quality_allowance.TOLD[self.verdict],
            self.releases,
            "-" if self.would_keep_all is None else f"{self.would_keep_all:g}",
        )


def show(paths: Paths, recipe: str, *, as_json: bool = False) -> None:
    """Of each stage that was measured; where none was, the limits of the recipe's chain."""
    measured: dict[str, list[QualityRecord]] = {}
    for release in Releases(paths).of_recipe(recipe):
        if found := against_parent(paths, release):
            measured.setdefault(release.stage, []).append(found)
    rows: list[LimitRow] = []
    for stage in () if measured else chain_of(paths, recipe):
        rows += [LimitRow(stage.name, name, one) for name, one in stage.quality.model_dump().items() if one is not None]
    for name, records in measured.items():
        try:
            rows += rows_of(manifests.load_stage(paths.project, name), records)
        except (InputError, ManifestError) as why:  # renamed or gone since
            (terminal.say if as_json else terminal.show)(f"stage {name} is left out: {why}")
    quick = sum(found.quick for each in measured.values() for found in each)
    if as_json:
        value = {"recipe": recipe, "quick_records": quick, "limits": [asdict(row) for row in rows]}
        terminal.show(json.dumps(value, indent=2, sort_keys=True))
        return
    if rows:
        terminal.table(COLUMNS, [row.cells for row in rows])
    if quick:
        terminal.show(f"{terminal.count(quick, 'record')} of --quick among them: wide intervals")
    if measured:
        terminal.show("how limits are derived from these: docs/quality.md")
    else:
        told = f"nothing was measured: no release of {recipe} was compared with its parent stage yet"
        terminal.show(f"{told}; next: invoke quality --recipe {recipe}")


def chain_of(paths: Paths, recipe: str) -> Sequence[Stage]:
    with contextlib.suppress(InputError, ManifestError):  # of a recipe that is gone releases may be left
        return manifests.load_chain(paths.project, manifests.load_recipe(paths.project, recipe).stage)
    return ()


def rows_of(stage: Stage, found: Sequence[QualityRecord]) -> Iterator[LimitRow]:
    """found: at least one, from the oldest to the newest. Of each limit that could be measured, set or not."""
    limits = stage.quality.model_dump()
    # A limit for everything, so that each figure is there to be seen; what it is set to does not matter.
    every = Quality(**{name: limit if limit is not None else 1.0 for name, limit in limits.items()})
    seen = [{line.name: line for line in quality_allowance.again(record, every)} for record in found]
    for name, newest in seen[-1].items():
        figures = [lines[name].seen for lines in seen if name in lines]
        least = name in quality_allowance.AT_LEAST
        end = min(figure.low for figure in figures) if least else max(figure.high for figure in figures)
        is_set = limits[name] is not None
        kept = newest.kept if is_set else None
        yield LimitRow(stage.name, name, limits[name], newest.seen, kept, len(figures), rounded(end, down=least))


def rounded(value: float, *, down: bool) -> float:
    """To the side that is easier to keep. Of a share near 1 and a ratio near 1 what counts is the distance from it."""
    if value == 0:
        return 0.0
    near = abs(value - 1) < 0.5
    rest = abs(value - 1) if near else abs(value)
    unit = 10.0 ** (math.floor(math.log10(rest)) - STEP + 1) if rest else 1.0
    scaled = value / unit
    whole = math.floor(scaled + 1e-9) if down else math.ceil(scaled - 1e-9)
    return float(f"{whole * unit:.12g}")
