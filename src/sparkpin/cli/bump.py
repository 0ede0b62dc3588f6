"""The task `bump`: find what is current, and hand it on with what the other commands do."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from sparkpin.cli.bench import ALL_PARTS, ROUNDS, common, plan_for, subject_of
from sparkpin.cli.choose import choose_recipe, require_recipe
from sparkpin.cli.options import Recipe
from sparkpin.cli.quality import Pair, compared
from sparkpin.cli.releases import promote
from sparkpin.cli.smoke import smoke_releases
from sparkpin.cli.tasks import task
from sparkpin.core.errors import InputError
from sparkpin.core.paths import Paths
from sparkpin.distribute.signing import ensure_attested
from sparkpin.host.engine import Engine
from sparkpin.measure.bench.compare import compare
from sparkpin.measure.bench.plan import BenchParts
from sparkpin.measure.bench.record import Comparison
from sparkpin.measure.bench.run import BenchPlace
from sparkpin.measure.quality import texts
from sparkpin.releases.current import require_current
from sparkpin.releases.quality_record import QualityRecord
from sparkpin.releases.record import Release, Releases
from sparkpin.upgrade.bump import run
from sparkpin.upgrade.bump.run import What
from sparkpin.upgrade.bump.steps import Commands

LONGEST = 3650  # days


@task("measure")
def bump(
    *,
    what: Annotated[What, "update only this component: vllm, python, debian or model (default: all)", "PART"] = "all",
    recipe: Recipe = None,
    apply: Annotated[bool, "where the verdict is `promote`: promote it, and write the lock"] = False,
    quick: Annotated[bool, "fewer texts, questions and cells: sooner, and less sure"] = False,
    hold: Annotated[int, "days that a wheel must have been offered for (default: 7; 0: take all)", "DAYS"] = 7,
) -> None:
    """Try newer versions against the current release, on the side."""
    if not 0 <= hold <= LONGEST:
        raise InputError(f"--hold: got {hold}, expected 0 to {LONGEST} (days)", next_step="--hold 7")
    paths = Paths.from_env()
    name = choose_recipe(paths, recipe, None)
    records = Releases(paths)
    require_recipe(paths, records, name)
    run.bump(paths, require_current(records, name), run.Asked(what, hold, quick, apply), commands(quick))


def commands(quick: bool) -> Commands:
    quality, speed = partial(measure_quality, quick), partial(measure_speed, quick)
    return Commands(ensure_attested, smoke_releases, quality, speed, promote)


def measure_quality(quick: bool, paths: Paths, engine: Engine, release: Release, reference: Release) -> QualityRecord:
    return compared(paths, engine, Pair(release, reference, "named"), texts.load(quick=quick))


def measure_speed(quick: bool, paths: Paths, engine: Engine, before: Release, after: Release, keep: bool) -> Comparison:
    subjects = subject_of(paths, before), subject_of(paths, after)
    plan = common([plan_for(one, BenchParts(ALL_PARTS, quick=quick)) for one in subjects])
    return compare(BenchPlace.here(paths, engine, None), subjects, plan, ROUNDS, keep=keep)
