"""The tasks `bump` and `bisect`: newer versions tried on the side, and the change that is to blame."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Annotated

from sparkpin.build.make import checkpoint_of
from sparkpin.cli.measure import ROUNDS, Pair, compared
from sparkpin.cli.releases import promote
from sparkpin.cli.smoke import smoke_releases
from sparkpin.cli.tasks import Recipe, task
from sparkpin.core import files, locks
from sparkpin.core.errors import InputError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import count, printable, show
from sparkpin.distribute.signing import ensure_attested
from sparkpin.host.engine import Engine
from sparkpin.host.machine import default_recipe
from sparkpin.measure.bench.plan import common
from sparkpin.measure.bench.record import Comparison
from sparkpin.measure.bench.run import compare, plan_for
from sparkpin.measure.quality import corpus
from sparkpin.releases.current import current_of
from sparkpin.releases.quality_record import QualityRecord
from sparkpin.releases.record import Release
from sparkpin.upgrade import bump_run as run
from sparkpin.upgrade.bisect_check import Check
from sparkpin.upgrade.bisect_plan import BisectPlan, make_plan
from sparkpin.upgrade.bisect_search import FOLDER, Search
from sparkpin.upgrade.bump_run import What
from sparkpin.upgrade.bump_steps import Commands

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
    """Try newer versions against the current release, on the side.

    invoke bump --what vllm --apply
    """
    if not 0 <= hold <= LONGEST:
        raise InputError(f"--hold: got {hold}, expected 0 to {LONGEST} (days)", next_step="--hold 7")
    current = current_of(paths, recipe or default_recipe(paths.project))
    run.bump(paths, current, run.Asked(what, hold, apply), commands(paths))


def commands(paths: Paths) -> Commands:
    return Commands(ensure_attested, smoke_releases, measure_quality, measure_speed, partial(promote, paths))


def measure_quality(paths: Paths, engine: Engine, release: Release, reference: Release) -> QualityRecord:
    return compared(paths, engine, Pair(release, reference, "named"), corpus.load())


def measure_speed(paths: Paths, engine: Engine, before: Release, after: Release, record: bool) -> Comparison:
    plan = common(plan_for(paths, before), plan_for(paths, after))
    return compare(paths, engine, (before, after), plan, ROUNDS, save=record)


@task("measure")
def bisect(
    paths: Paths,
    *,
    good: Annotated[str, "release whose check is good", "TAG"],
    bad: Annotated[str, "release whose check is bad", "TAG"],
    check: Annotated[str, "shell command (docs/bisect.md): 0 is good, 124 and 125 inconclusive, any other code bad"],
    serve: Annotated[bool, "start a server for each trial: its address is SPARKPIN_ENDPOINT"] = False,
) -> None:
    """Find the change between two releases that makes a check fail.

    invoke bisect --good A --bad B --check ./check.sh --serve
    """
    plan, asked = make_plan(paths, good, bad), Check(check, serve)
    show(f"- good {plan.good.tag}\n+ bad  {plan.bad.tag}")
    show_changes(plan, plan.changes)
    folder = paths.home / FOLDER / asked.identity(plan)
    search = Search(plan, partial(asked.judge, paths), folder)
    with locks.claim(paths), files.lock(folder / ".lock", wait=False):  # a prune waits
        for release in (plan.good, plan.bad) if serve else ():
            checkpoint_of(paths, release)
        require_ends(search)
        found = search.culprits()
        without = search.trial(plan.changes.keys() - {*found})
    show("the check fails on the good release with:")
    show_changes(plan, found)
    show(f"the bad release without this: {without.verdict} ({printable(without.how)})")
    if unresolved := sum(trial.verdict == "unresolved" for trial in search.trials.values()):
        show(f"{count(unresolved, 'combination')} unresolved: a smaller change may hide there")
    show(f"trials and logs: {folder}")


def show_changes(plan: BisectPlan, changes: Iterable[str]) -> None:
    show("\n".join(f"  {printable(plan.changes[change])}" for change in changes))


def require_ends(search: Search) -> None:
    """InputError unless good is good, and bad is bad or does not start: anything else is a search for nothing."""
    good, bad = search.trial(()), search.trial(search.plan.changes)
    step = f"correct the check, or choose other releases; to forget this search: rm -r {search.folder}"
    if good.verdict != "good":
        raise InputError(f"--good {search.plan.good.tag} is {good.verdict} ({good.how})", next_step=step)
    if bad.verdict != "bad" and bad.started:
        raise InputError(f"--bad {search.plan.bad.tag} is {bad.verdict} ({bad.how})", next_step=step)
