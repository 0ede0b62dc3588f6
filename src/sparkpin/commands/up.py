"""The main line, `invoke up` and `invoke build`: plan -> fetch -> build -> attest -> report."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from sparkpin.build.consistent import require_consistent
from sparkpin.build.make import at_work, build_releases, fetch_missing, smoke_releases
from sparkpin.build.pair import Pairing
from sparkpin.commands import tables
from sparkpin.commands.choose import pairings_of
from sparkpin.commands.notes import finish, next_smoke, notes_of
from sparkpin.commands.smoke import waiting_for_smoke
from sparkpin.core import terminal
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say, show
from sparkpin.evidence.attest import ensure_attested
from sparkpin.fetch.store import Store
from sparkpin.host import machine as host
from sparkpin.host.engine import engine_of
from sparkpin.pins.schema import LockedFile
from sparkpin.releases import current, quality_gate
from sparkpin.releases.record import Release, Releases


@dataclass(frozen=True)
class BuildPlan:
    """What `up` and `build` are about to do, known from files alone: a dry run shows it and ends."""

    paths: Paths
    pairings: tuple[Pairing, ...]  # the chain of stages; the last is the one asked for
    notes: tuple[str, ...]  # what was overruled, what was chosen, and what vLLM will refuse

    @property
    def states(self) -> list[str]:
        """Of each pairing's release."""
        known = [Releases(self.paths).find(pairing.tag) for pairing in self.pairings]
        return [release.state_text if release else "to be built" for release in known]

    @property
    def absent(self) -> list[LockedFile]:
        """Of the stack's lock, what the store has not."""
        store = Store(self.paths.store)
        return [file for file in self.pairings[-1].stack_lock.files if not store.has(file)]


def up(*, recipe: str | None, stage: str | None, stack: str | None, smoke: bool, dry_run: bool) -> None:
    """The main job: what is missing of programs, fetch, build, checkpoint and smoke, then the table."""
    plan = plan_of(recipe, stage, stack)
    announce(plan)
    machine = host.read_host()
    lacking = host.missing(plan.paths, machine, stack=plan.pairings[-1].stack)
    for requirement in lacking:
        show(f"missing: {requirement.name}: {requirement.detail}; {requirement.fix}")
    if dry_run:
        show("Dry run: nothing was changed.")
        return
    host.install(lacking, machine, say)
    made = carry_out(plan)
    if smoke and (waiting := waiting_for_smoke(plan.paths, made)):
        smoke_releases(plan.paths, waiting)
        made = tuple(Releases(plan.paths).get(release.tag) for release in made)
    first_is_current(plan.paths, made[-1])
    report(plan.paths, made, smoked=smoke)


def build(*, recipe: str | None, stage: str | None, stack: str | None, offline: bool) -> tuple[Release, ...]:
    """offline: what is missing is an error."""
    plan = plan_of(recipe, stage, stack)
    for note in plan.notes:
        say(note)
    made = carry_out(plan, offline=offline)
    report(plan.paths, made)
    return made


def carry_out(plan: BuildPlan, *, offline: bool = False) -> tuple[Release, ...]:
    """The releases of the plan, the stage asked for last."""
    with at_work(plan.paths) as engine:
        fetch_missing(plan.paths, engine, plan.pairings, offline=offline)
        built = build_releases(plan.paths, engine, plan.pairings)
        return tuple(attest(plan.paths, release) for release in built)


def plan_of(recipe: str | None, stage: str | None, stack: str | None) -> BuildPlan:
    paths, pairings = pairings_of(recipe, stage, stack)
    return BuildPlan(paths, pairings, notes_of(paths, pairings[-1]))


def announce(plan: BuildPlan) -> None:
    last = plan.pairings[-1]
    show(f"Stack {last.stack.name}: {last.stack.description}.")
    show(f"Recipe {last.recipe.name}: {last.recipe.description}.")
    for pairing, state in zip(plan.pairings, plan.states, strict=True):
        show(f"  {pairing.stage.name:8} {pairing.stage.description} ({state})")
    if absent := plan.absent:
        size = terminal.size(sum(file.size for file in absent))
        show(f"To be fetched: {len(absent)} of {len(last.stack_lock.files)} files, {size}.")
    for note in plan.notes:
        say(note)


def attest(paths: Paths, release: Release) -> Release:
    """Before the next stage is built, so that one that fails leaves the evidence of those below it."""
    ensure_attested(paths, release, say)
    return release


def first_is_current(paths: Paths, newest: Release) -> None:
    """The first release of a recipe that passed is promoted, unless `promote` refuses it for what it has lost: nobody
    asked for this promotion."""
    if not newest.smoke_passed or Releases(paths).current(newest.recipe):
        return
    if why := quality_gate.refusal(paths, newest):
        say(f"{newest.tag} passed, and is not current: {why}")
        return
    current.promote(paths, engine_of(paths), newest.tag, partial(require_consistent, paths, finished=True))
    say(f"{newest.tag} is the first release that passed, so it is current")


def report(paths: Paths, made: tuple[Release, ...], *, smoked: bool = False) -> None:
    """The table, and what to type next. SmokeError where `smoked`, and one of them failed."""
    tables.show_built(made)
    if not next_smoke(paths, made) and smoked:
        finish(Releases(paths), made)
