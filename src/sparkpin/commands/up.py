"""The main line: plan, fetch, build, attest, report."""

from __future__ import annotations

from sparkpin.build.make import build_releases, engine_of, smoke_releases
from sparkpin.commands import tables
from sparkpin.commands.choose import pairings_of
from sparkpin.commands.notes import finish, next_smoke, say_chosen, say_mistakes, say_overruled
from sparkpin.commands.smoke import waiting_for_smoke
from sparkpin.core import terminal
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say, show
from sparkpin.fetch.store import Store
from sparkpin.host import machine as host
from sparkpin.releases import current as retention
from sparkpin.releases import quality_gate
from sparkpin.releases.record import Release, Releases


def up(*, recipe: str | None, stage: str | None, stack: str | None, smoke: bool, dry_run: bool) -> None:
    """The main job: what is missing of fetch, build, checkpoint and smoke, then the table."""
    paths, pairings = pairings_of(recipe, stage, stack)
    machine = host.read_host()
    last = pairings[-1]
    records = Releases(paths)
    show(f"Stack {last.stack.name}: {last.stack.description}.")
    show(f"Recipe {last.recipe.name}: {last.recipe.description}.")
    for pairing in pairings:
        known = records.find(pairing.tag)
        show(f"  {pairing.stage.name:8} {pairing.stage.description} ({known.state if known else 'to be built'})")
    locked = last.stack_lock.files
    if absent := [file for file in locked if not Store(paths.store).has(file)]:
        show(
            f"To be fetched: {len(absent)} of {len(locked)} files, {terminal.size(sum(file.size for file in absent))}."
        )
    say_overruled(last.recipe, last.stack, last.chain)
    say_mistakes(paths, last)
    say_chosen(last)
    lacking = host.missing(paths, machine, stack=last.stack)
    for requirement in lacking:
        show(f"missing: {requirement.name}: {requirement.detail}; {requirement.fix}")
    if dry_run:
        show("Dry run: nothing was changed.")
        return
    host.install(lacking, machine, say)
    made = build_releases(paths, pairings)
    if smoke and (waiting := waiting_for_smoke(paths, made)):
        smoke_releases(paths, waiting)
        made = tuple(records.get(release.tag) for release in made)
    newest = made[-1]
    if newest.smoke_passed and records.current(newest.recipe) is None:
        make_first_current(paths, newest)
    tables.show_built(made)
    if not next_smoke(paths, made) and smoke:
        finish(records, made)


def make_first_current(paths: Paths, release: Release) -> None:
    """Unless `promote` refuses it for what it has lost: nobody asked for this promotion."""
    if why := quality_gate.refusal(paths, release):
        say(f"{release.tag} passed, and is not current: {why}")
        return
    retention.promote(paths, engine_of(paths), release.tag)
    say(f"{release.tag} is the first release that passed, so it is current")


def build(*, recipe: str | None, stage: str | None, stack: str | None, offline: bool) -> tuple[Release, ...]:
    paths, pairings = pairings_of(recipe, stage, stack)
    say_overruled(pairings[-1].recipe, pairings[-1].stack, pairings[-1].chain)
    say_mistakes(paths, pairings[-1])
    say_chosen(pairings[-1])
    made = build_releases(paths, pairings, offline=offline)
    tables.show_built(made)
    next_smoke(paths, made)
    return made
