"""The task `bump`: find what is current, and hand it on with what the other commands do."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from sparkpin.cli.bench import ROUNDS, common, plan_for, subject_of
from sparkpin.cli.choose import current_of
from sparkpin.cli.options import Recipe
from sparkpin.cli.quality import Pair, compared
from sparkpin.cli.releases import promote
from sparkpin.cli.smoke import smoke_releases
from sparkpin.cli.tasks import task
from sparkpin.core.errors import InputError
from sparkpin.core.paths import Paths
from sparkpin.distribute.signing import ensure_attested
from sparkpin.host.engine import Engine
from sparkpin.host.machine import default_recipe
from sparkpin.measure.bench.compare import compare
from sparkpin.measure.bench.record import Comparison
from sparkpin.measure.bench.run import BenchPlace
from sparkpin.measure.quality import texts
from sparkpin.releases.quality_record import QualityRecord
from sparkpin.releases.record import Release
from sparkpin.upgrade.bump import run
from sparkpin.upgrade.bump.run import What
from sparkpin.upgrade.bump.steps import Commands

LONGEST = 3650  # days


@task("measure")
def bump(
    paths: Paths,
    *,
    what: Annotated[What, "update only this component: vllm, python, debian or model (default: all)", "PART"] = "all",
    recipe: Recipe = None,
    apply: Annotated[bool, "where the verdict is `promote`: promote it, and write the lock"] = False,
    hold: Annotated[int, "days that a wheel must have been offered for (default: 7; 0: take all)", "DAYS"] = 7,
) -> None:
    """Try newer versions against the current release, on the side."""
    if not 0 <= hold <= LONGEST:
        raise InputError(f"--hold: got {hold}, expected 0 to {LONGEST} (days)", next_step="--hold 7")
    current = current_of(paths, recipe or default_recipe(paths.project))
    run.bump(paths, current, run.Asked(what, hold, apply), commands(paths))


def commands(paths: Paths) -> Commands:
    return Commands(ensure_attested, smoke_releases, measure_quality, measure_speed, partial(promote, paths))


def measure_quality(paths: Paths, engine: Engine, release: Release, reference: Release) -> QualityRecord:
    return compared(paths, engine, Pair(release, reference, "named"), texts.load())


def measure_speed(paths: Paths, engine: Engine, before: Release, after: Release, keep: bool) -> Comparison:
    subjects = subject_of(paths, before), subject_of(paths, after)
    plan = common([plan_for(one) for one in subjects])
    return compare(BenchPlace.here(paths, engine, None), subjects, plan, ROUNDS, keep=keep)
