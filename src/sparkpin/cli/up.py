"""The main line, `invoke up`: plan -> fetch -> build -> attest -> smoke -> report."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated

from sparkpin.build.checkpoint import ModelNeeds, how_long, needs_of
from sparkpin.build.consistent import is_brought, require_consistent
from sparkpin.build.make import at_work
from sparkpin.checkpoint.steps import used_repositories
from sparkpin.cli import serve as serving
from sparkpin.cli.build import BuildPlan, carry_out, plan_of, report
from sparkpin.cli.choose import choose_recipe
from sparkpin.cli.options import Authority, DryRun, Recipe, Stack, Stage
from sparkpin.cli.smoke import complete_above, smoke_of_served, smoke_releases, waiting_for_smoke
from sparkpin.cli.tasks import task
from sparkpin.core import terminal
from sparkpin.core.errors import DiskError, InputError, IntegrityError, SmokeError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say, show
from sparkpin.fetch.lock_model import lock_model
from sparkpin.fetch.model import absent_wheel, fetch_model
from sparkpin.host import machine as host
from sparkpin.host import preflight
from sparkpin.host.engine import Engine, engine_of
from sparkpin.host.machine import read_gpus
from sparkpin.host.skopeo import AbsentError, Registry
from sparkpin.pins import manifests
from sparkpin.pins.nodes import nodes_of
from sparkpin.releases import current, quality_gate
from sparkpin.releases.record import Release, Releases
from sparkpin.releases.runs_here import obstacle, obstacle_of
from sparkpin.serve.launch import is_kept_up
from sparkpin.serve.served import find, name_of
from sparkpin.smoke import drafting, drift


@task("serve")
def up(
    *,
    stage: Stage = None,
    recipe: Recipe = None,
    stack: Stack = None,
    no_smoke: Annotated[bool, "build only"] = False,
    serve: Annotated[bool, "serve the last stage as soon as it has passed; the others are tested after it"] = False,
    yes: Annotated[bool, "fetch the model's files without asking"] = False,
    from_: Annotated[str, "fetch what is published there and signed, and build the rest", "oci://HOST/NAME"] = "",
    ca: Authority = "",
    dry_run: DryRun = False,
) -> None:
    """The main job: lock, fetch, build, checkpoint and smoke.

    invoke up --serve
    invoke up --recipe qwen3.5-122b --stage v2 --dry-run
    """
    paths = Paths.from_env()
    smoke = not no_smoke
    place = Registry.parse(from_, ca) if from_ else None
    unlocked = unlocked_models(paths, recipe, stack)
    if unlocked and dry_run:
        if stage:
            manifests.load_chain(paths.project, stage)
        show(f"not locked: {', '.join(unlocked)}; invoke up locks it first (headers and what the steps take)")
        show(f"next: {' && '.join(f'invoke lock --model {name}' for name in unlocked)}, then the same command")
        return
    for name in unlocked:
        say(f"{name} is not locked yet: invoke lock --model {name}, which fetches headers and what steps take")
        lock_model(paths, name)
    plan = plan_of(recipe, stage, stack)
    announce(plan, place)
    download = model_download(plan, dry_run=dry_run) if smoke else None
    machine = host.read_host()
    lacking = preflight.missing(plan.paths, machine, plan.pairings[-1].stack, published=place is not None)
    for requirement in lacking:
        show(f"missing: {requirement.name}: {requirement.detail}; {requirement.fix}")
    if dry_run:
        show("Dry run: nothing was changed.")
        return
    if download:
        typed = [f"--stack {stack}"] * bool(stack) + ["--serve"] * serve
        agree(plan, download, yes=yes, typed=typed)
    preflight.install(lacking, machine)
    if download:
        fetch_download(plan)
    made = carry_out(plan, take=partial(take_published, plan, place) if place else lambda engine: {})
    if smoke:
        made = smoke_chain(plan, made, serve=serve)
    first_is_current(plan.paths, made[-1])
    report(plan.paths, made, smoked=smoke, serves=serve)
    if serve and (tag := Releases(plan.paths).current_tag(made[-1].recipe)):
        if tag != made[-1].tag:
            show(f"{tag} is current, so that is served, and not {made[-1].tag}")
        serving.serve_release(recipe=made[-1].recipe)  # what runs already is left alone


def is_taken(paths: Paths, engine: Engine, release: Release) -> bool:
    """Whether a release that was brought before is here, and signed by whom this machine trusts today: an import may
    have taken it unsigned."""
    from sparkpin.distribute import verify

    if current.present_ref(engine, release) is None:
        return False
    checks = verify.check_evidence(verify.evidence_of(paths, release))
    return all(verify.demanded(check).result != "wrong" for check in checks)


def take_published(plan: BuildPlan, place: Registry, engine: Engine) -> dict[str, Release]:
    """By tag: what a registry has of the chain, and what it gave before. What does not verify is built instead."""
    from sparkpin.distribute.registry import pull

    records, taken = Releases(plan.paths), dict[str, Release]()
    for pairing in plan.pairings:
        known = records.find(pairing.tag)
        if known is None or (is_brought(plan.paths, known) and not is_taken(plan.paths, engine, known)):
            try:
                known = pull(plan.paths, engine, replace(place, tag=pairing.tag.rpartition(":")[2])).release
            except (AbsentError, IntegrityError) as error:
                say(f"{pairing.stage.name} is built here: {error.message}")
                continue
        if is_brought(plan.paths, known):
            if known.demands == pairing.demands:
                taken[pairing.tag] = known
                say(f"{pairing.stage.name} is taken, not built: {pairing.tag}")
            else:
                say(f"{pairing.stage.name} is built here: the published one asks for another smoke test")
    return taken


def unlocked_models(paths: Paths, recipe: str | None, stack: str | None) -> list[str]:
    """The recipe's model and its drafter, as far as they have no lock."""
    pin = manifests.model_of(paths.project, manifests.load_recipe(paths.project, choose_recipe(paths, recipe, stack)))
    return manifests.unlocked(paths.project, pin)


def model_download(plan: BuildPlan, *, dry_run: bool) -> ModelNeeds | None:
    """What a Hub has to give before a server can start here, told; None for nothing."""
    last = plan.pairings[-1]
    if all(last.model.owner(name).is_made for name in last.model.repositories):
        return None
    gpus = read_gpus() if last.stack.gpu else ()
    if why := obstacle_of(last.stack, host.this_platform(), gpus):
        show(f"No server can run here, so no more of {last.model.name} is fetched than its lock takes: {why}.")
    if why and not dry_run:
        return None
    needs = needs_of(plan.paths, last.model, last.model_lock, [pairing.steps for pairing in plan.pairings])
    if not needs.fetch:
        return None
    stack = sum(file.size for file in plan.absent)
    repositories = " and ".join(needs.repositories)
    show(
        f"{'Where one can run: download' if why else 'Download'}: {terminal.size(needs.fetch)} of {repositories}"
        f"; {how_long(needs.fetch + stack)}"
        f"{', with those of the stack' if stack else ''} (rates are assumed)."
    )
    for row in disk_of(plan, needs):
        show(f"Disk, with checkpoints{' and images' if 'to be built' in plan.states else ''}: {row.text}.")
    return needs


def disk_of(plan: BuildPlan, needs: ModelNeeds) -> list[preflight.DiskRow]:
    images = preflight.needs_for(plan.pairings[-1].stack) if "to be built" in plan.states else None
    return needs.disk(plan.paths, images)


def agree(plan: BuildPlan, needs: ModelNeeds, *, yes: bool, typed: Sequence[str] = ()) -> None:
    """One question for the whole download. DiskError where there is no room, InputError where nobody says yes. typed:
    further options, for the line to type then."""
    for row in disk_of(plan, needs):
        if row.short:
            raise DiskError(row.text, next_step="free space there, or set SPARKPIN_CACHE and SPARKPIN_HOME elsewhere")
    if yes:
        return
    last = plan.pairings[-1]
    line = " ".join(("invoke up --recipe", last.recipe.name, "--stage", last.stage.name, *typed, "--yes"))
    size = terminal.size(needs.fetch)
    if not sys.stdin.isatty():
        raise InputError(f"{size} are to be fetched, and there is no terminal to ask on; nothing was", next_step=line)
    print(f"Fetch {size}? [y/N] ", end="", flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise InputError(f"{size} were not fetched: the answer was not yes", next_step=line)


def fetch_download(plan: BuildPlan) -> None:
    """The model's files, before minutes of building: what a network or a disk refuses is known soonest."""
    last = plan.pairings[-1]
    used = {name for pairing in plan.pairings for name in used_repositories(last.model, pairing.steps)}
    with at_work(plan.paths):
        fetch_model(plan.paths, last.model, last.model_lock, only=used)


def announce(plan: BuildPlan, place: Registry | None = None) -> None:
    last = plan.pairings[-1]
    show(f"Stack {last.stack.name}: {last.stack.description}.")
    show(f"Recipe {last.recipe.name}: {last.recipe.description}.")
    for pairing, state in zip(plan.pairings, plan.states, strict=True):
        state = "to be taken, else built" if place and state == "to be built" else state
        show(f"  {pairing.stage.name:8} {pairing.stage.description} ({state})")
    if place:
        show(f"To be taken: what {place} has of it, signed by whom this machine trusts.")
    if absent := plan.absent:
        size = terminal.size(sum(file.size for file in absent))
        needed = f", if {plan.pairings[0].stage.name} is built" * bool(place)
        show(f"To be fetched{needed}: {len(absent)} of {len(last.stack_lock.files)} files, {size}.")
    if wheel := absent_wheel(plan.paths, last.model, last.model_lock):
        show(f"To be fetched, too: {wheel.file}, {terminal.size(wheel.size)}, which holds the model.")
    for note in plan.notes:
        say(note)


def smoke_chain(plan: BuildPlan, made: tuple[Release, ...], *, serve: bool) -> tuple[Release, ...]:
    """Smoke-test what waits for it: the end of the chain, then the stage below, to which it is compared, then the rest.

    With `serve` the server that tests the end of the chain stays, so that the first answer takes one start. It becomes
    current once it has been compared; `up` serves what is current at its end.
    """
    paths, records, end = plan.paths, Releases(plan.paths), made[-1]
    waiting = waiting_for_smoke(paths, made)
    first = [release for release in reversed(made[-2:]) if release in waiting]
    if first and obstacle(paths, engine_of(paths), end):
        first, serve = [], False  # no server can run here
    order = [*first, *(release for release in waiting if release not in first)]
    if serve and first and len(order) > len(first) and not has_room(plan):
        show("the server needs the memory, so the other stages are not smoke-tested now: later, `invoke smoke` does it")
        order = first
    served = False
    for number, release in enumerate(order):
        if serve and release == end and is_testable_as_served(plan, end, total=len(order)):
            served = smoke_as_served(plan, end, total=len(order))
        else:
            smoke_releases(paths, (release,), done=number, total=len(order))
        complete_above(paths, (release,))
        end = records.get(end.tag)
        if release in first and drift.is_compared(end):
            first_is_current(paths, end)
    if served and records.current_tag(end.recipe) != end.tag:
        why = "; ".join(end.smoke_failures) or f"it could not be compared with stage {end.demands.parent}"
        show(f"warning: {end.tag} is served, but not current: {why}\n  next: invoke stop")
    return tuple(records.get(release.tag) for release in made)


def is_testable_as_served(plan: BuildPlan, end: Release, *, total: int) -> bool:
    """Whether one start is enough: the server that is tested is the recipe's first, and stays. total: tests to come."""
    paths = plan.paths
    there = find(engine_of(paths), name_of(paths, end.recipe))
    return (
        Releases(paths).current_tag(end.recipe) is None
        and (there is None or not is_kept_up(there))  # else a killed run left it, and `serve` removes it
        and nodes_of(end.argv) == 1
        and len(list(drafting.variants(end))) == 1
        and not quality_gate.is_refused(paths, end)
        and (total == 1 or has_room(plan))
    )


def smoke_as_served(plan: BuildPlan, end: Release, *, total: int) -> bool:
    """The smoke test of the end of the chain, by the server that answers clients afterwards; whether it does."""
    say(f"smoke test 1 of {total}: {end.tag}")
    try:
        with smoke_of_served(plan.paths) as test:
            serving.serve_release(release=end.tag, test=test)
    except SmokeError:
        if not Releases(plan.paths).get(end.tag).smoke_failed:
            raise
        return False
    say(f"{end.tag} has passed and is served")
    return True


def has_room(plan: BuildPlan) -> bool:
    """For a smoke test beside a server that nobody asks yet; a GPU's memory is for one."""
    return plan.pairings[-1].stack.gpu is None and host.read_host().memory_available > preflight.MEMORY


def first_is_current(paths: Paths, newest: Release) -> None:
    """The first release of a recipe that passed is promoted, unless `promote` refuses it for what it has lost, or its
    check `drift` had nothing to compare with: nobody asked for this promotion."""
    if not newest.smoke_passed or Releases(paths).current(newest.recipe):
        return
    if not drift.is_compared(newest):
        say(f"{newest.tag} passed, and is not current: it was not compared with the stage below")
        return
    if why := quality_gate.refusal(paths, newest):
        say(f"{newest.tag} passed, and is not current: {why}")
        return
    require_consistent(paths, newest, finished=True)
    current.promote(paths, engine_of(paths), newest)
    say(f"{newest.tag} is the first release that passed, so it is current")
