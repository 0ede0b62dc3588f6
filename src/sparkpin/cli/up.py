"""The main line, `invoke up`: lock -> plan -> fetch -> build -> smoke -> report."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated

from sparkpin.build.checkpoint import ModelNeeds, needs_ahead, needs_of
from sparkpin.build.consistent import is_brought, require_consistent
from sparkpin.checkpoint.steps import checkpoint_steps
from sparkpin.cli import serve as serving
from sparkpin.cli.add import add
from sparkpin.cli.build import BuildPlan, carry_out, plan_of
from sparkpin.cli.notes import report
from sparkpin.cli.smoke import smoke_release, smoke_releases
from sparkpin.cli.tasks import Authority, DryRun, Recipe, Stack, Stage, task
from sparkpin.core.errors import WHOLE, DiskError, InputError, IntegrityError, ManifestError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import count, say, show, size
from sparkpin.fetch.lock_model import lock_model
from sparkpin.fetch.store import Store
from sparkpin.host import machine, preflight
from sparkpin.host.engine import Engine, engine_of
from sparkpin.host.skopeo import AbsentError, Registry
from sparkpin.pins import manifests, schema
from sparkpin.pins.nodes import nodes_of
from sparkpin.pins.schema import UNRESOLVED
from sparkpin.recipes.add import read_hub, recipe_name
from sparkpin.recipes.adopt import Wanted
from sparkpin.releases import current, quality_gate
from sparkpin.releases.record import Release, Releases
from sparkpin.releases.runs_here import obstacle_of
from sparkpin.serve import service
from sparkpin.serve.served import read, running_release
from sparkpin.smoke.evidence import is_compared, owes


@task("serve")
def up(
    paths: Paths,
    *,
    stage: Stage = None,
    recipe: Recipe = None,
    model: Annotated[str, "add this model of the Hub first, where no recipe has its name", "hf:OWNER/NAME[@REV]"] = "",
    stack: Stack = None,
    no_smoke: Annotated[bool, "build only"] = False,
    serve: Annotated[bool, "also serve the last stage, by the server that was tested"] = False,
    yes: Annotated[bool, "fetch the model's files without asking"] = False,
    from_: Annotated[str, "fetch what is published there and signed, and build the rest", "oci://HOST/NAME"] = "",
    ca: Authority = "",
    dry_run: DryRun = False,
) -> None:
    """The main job: lock, fetch, build, checkpoint and smoke.

    invoke up --serve
    invoke up --recipe qwen3.5-122b --stage v2 --dry-run
    invoke up --model hf:Qwen/Qwen3-8B --serve
    """
    if model:
        recipe = recipe_of(paths, model, recipe, stack, dry_run=dry_run)
        if dry_run and not (paths.project / f"recipes/{recipe}.yaml").is_file():
            return
    place, asked = Registry.parse(from_, ca) if from_ else None, recipe or machine.default_recipe(paths.project, stack)
    chosen = manifests.load_recipe(paths.project, asked)
    open_models = manifests.unlocked(paths.project, manifests.model_of(paths.project, chosen))
    if dry_run and open_models:
        announce_unlocked(paths, chosen, stage, stack, open_models)
        return
    for name in open_models:
        say(f"{name} is not locked yet: invoke lock --model {name}, which fetches headers and what steps take")
        lock_model(paths, name)
    plan, here = plan_of(paths, asked, stage, stack), machine.read_host()
    announce(plan, place)
    lacking = preflight.missing(paths, here, plan.pairings[-1].stack, published=place is not None)
    for requirement in lacking:
        show(f"missing: {requirement.name}: {requirement.detail}; {requirement.fix}")
    download = None if no_smoke else model_download(plan, dry_run=dry_run)
    if dry_run:
        if serve:
            now = [order.release.tag for order in read(paths.home, asked).orders[:1]]
            show(f"Then the current release of {asked} is served{f', in place of {now[0]}' if now else ''}.")
        show("Dry run: nothing was changed.")
        return
    if download and not yes:
        agree(download)
    preflight.install(lacking, here)
    releases = carry_out(plan, take=partial(take_published, plan, place) if place else lambda engine: {})
    with contextlib.ExitStack() as standing:
        if not no_smoke:
            smoke_chain(paths, releases, standing, serve=serve)
            releases = tuple(Releases(paths).get(release.tag) for release in releases)
        first_is_current(paths, releases[-1])
    report(paths, releases, smoked=not no_smoke, serves=serve)
    if serve and Releases(paths).current_tag(releases[-1].recipe):
        serving.serve(paths, recipe=releases[-1].recipe)  # what runs already is left alone


def recipe_of(paths: Paths, model: str, recipe: str | None, stack: str | None, *, dry_run: bool) -> str:
    """The recipe of a model of the Hub, which is added where it is not there. InputError for a recipe of that name with
    another model or commit, ManifestError where `add` finds errors."""
    name, (repo, revision) = recipe_name(Wanted(model, recipe or "")), read_hub(model)
    file = f"recipes/{name}.yaml"
    if not (paths.project / file).is_file():
        if add(paths, model, name=name, stack=stack, dry_run=dry_run):
            step = f"correct {file}, then invoke up --recipe {name}"
            raise ManifestError(file, WHOLE, {}, "a recipe without the errors above", next_step=step)
        return name
    served = manifests.load_recipe(paths.project, name)
    at = served.model_revision
    if revision and at == UNRESOLVED:
        pin = manifests.model_of(paths.project, served)
        at = manifests.load_model_lock(paths.project, pin).repositories[pin.base].revision
    if served.model != repo or revision not in ("", at):
        step = f"name the new one: --recipe NAME, or serve that one: invoke up --recipe {name}"
        raise InputError(f"--model {model}: {file} is of {served.model} at {at}", next_step=step)
    return name


def announce_unlocked(
    paths: Paths, recipe: schema.Recipe, stage: str | None, stack: str | None, unlocked: Sequence[str]
) -> None:
    """What is known before the headers are: stages, and the disk that images, model and checkpoints take."""
    chosen = manifests.load_stack(paths.project, stack or recipe.stack)
    chain = manifests.load_chain(paths.project, stage or recipe.stage)
    announce_stages(chosen, recipe, [(one, "to be built") for one in chain])
    pin = manifests.model_of(paths.project, recipe)
    ahead = needs_ahead(paths, pin, [checkpoint_steps(chain[:depth], pin) for depth in range(1, len(chain) + 1)])
    known = f", {size(ahead.fetch)} of the model and {size(ahead.checkpoints)} of checkpoints" if ahead else ""
    for row in (ahead or ModelNeeds((), 0, 0)).disk(paths, preflight.needs_for(chosen)):
        show(f"Disk, with images{known}: {row.text}.")
    show(f"Not locked yet: {', '.join(unlocked)}. `invoke up` locks by itself, which fetches headers alone.")
    show(f"next: invoke lock --model {unlocked[0]}")


def announce_stages(stack: schema.Stack, recipe: schema.Recipe, stages: Iterable[tuple[schema.Stage, str]]) -> None:
    show(f"Stack {stack.name}: {stack.description}.")
    show(f"Recipe {recipe.name}: {recipe.description}.")
    for stage, state in stages:
        show(f"  {stage.name:8} {stage.description} ({state})")


def announce(plan: BuildPlan, place: Registry | None) -> None:
    last, records, store = plan.pairings[-1], Releases(plan.paths), Store(plan.paths.store)
    releases = [(one.stage, records.find(one.tag)) for one in plan.pairings]
    states = [(stage, release.state_text if release else "to be built") for stage, release in releases]
    announce_stages(last.stack, last.recipe, states)
    if place:
        show(f"To be taken instead of built: what {place} has of it, signed by whom this machine trusts.")
    if absent := [file for file in last.stack_lock.files if not store.has(file)]:
        show(f"To be fetched: {count(len(absent), 'file')}, {size(sum(file.size for file in absent))}.")
    for note in plan.notes:
        say(note)


def model_download(plan: BuildPlan, *, dry_run: bool) -> ModelNeeds | None:
    """What a Hub has to give before a server can start here, told; None for nothing. DiskError where it has no
    room."""
    last = plan.pairings[-1]
    if all(last.model.owner(name).is_made for name in last.model.repositories):
        return None
    if why := obstacle_of(last.stack, machine.this_platform(), machine.read_gpus() if last.stack.gpu else ()):
        show(f"No server can run here, so no more of {last.model.name} is fetched than its lock takes: {why}.")
        return None
    needs = needs_of(plan.paths, last.model, last.model_lock, [pairing.steps for pairing in plan.pairings])
    if not needs.fetch:
        return None
    show(f"Download: {size(needs.fetch)} of {' and '.join(needs.repositories)}.")
    are_built = all(Releases(plan.paths).find(pairing.tag) for pairing in plan.pairings)
    for row in needs.disk(plan.paths, None if are_built else preflight.needs_for(last.stack)):
        show(f"Disk, with checkpoints{'' if are_built else ' and images'}: {row.text}.")
        if row.short and not dry_run:
            raise DiskError(row.text, next_step="free space there, or set SPARKPIN_CACHE and SPARKPIN_HOME elsewhere")
    return needs


def agree(needs: ModelNeeds) -> None:
    """One question for the whole download. InputError where nobody says yes."""
    print(f"Fetch {size(needs.fetch)}? [y/N] ", end="", flush=True)
    if not sys.stdin.isatty() or sys.stdin.readline().strip().lower() not in ("y", "yes"):
        cause = f"nothing was fetched: nobody at a terminal said yes to {size(needs.fetch)}"
        raise InputError(cause, next_step="the same command with --yes fetches it")


def is_taken(paths: Paths, engine: Engine, release: Release) -> bool:
    """Whether what was brought before is whole, and signed by whom this machine trusts today: an import may have taken
    it unsigned."""
    from sparkpin.distribute import verify  # slow to import

    checks = [*verify.check_evidence(verify.evidence_of(paths, release)), verify.check_loaded(engine, release)]
    return all(verify.demanded(check).result != "wrong" for check in checks)


def take_published(plan: BuildPlan, place: Registry, engine: Engine) -> dict[str, Release]:
    """By tag: what a registry has of the chain, and what it gave before. What this machine made stays; what does not
    verify is built instead."""
    from sparkpin.distribute.registry import pull  # slow to import

    imported = {}
    for pairing in plan.pairings:
        release = Releases(plan.paths).find(pairing.tag)
        if release and not is_brought(plan.paths, release):
            continue
        if not release or not is_taken(plan.paths, engine, release):
            try:
                release = pull(plan.paths, engine, replace(place, tag=pairing.tag.rpartition(":")[2])).release
            except (AbsentError, IntegrityError) as error:
                say(f"{pairing.stage.name} is built here: {error.message}")
                continue
        if release.demands == pairing.demands:  # else it asks for another smoke test
            imported[pairing.tag] = release
            say(f"{pairing.stage.name} is taken, not built: {pairing.tag}")
    return imported


def smoke_chain(paths: Paths, releases: Sequence[Release], standing: contextlib.ExitStack, *, serve: bool) -> None:
    """Smoke-test what waits for it, from the base up, since each stage is compared with the one below.

    A large model takes minutes to load. So the recipe's first server is tested as it is served, and stays if its
    release becomes current. standing: gets what stops it otherwise.
    """
    engine, end = engine_of(paths), releases[-1]
    waiting = [one for one in releases if one.smoke_failed or owes(paths, engine, one)]
    is_first = not (Releases(paths).current_tag(end.recipe) or running_release(paths, engine, end.recipe))
    stays = serve and is_first and end in waiting and nodes_of(end.argv) == 1
    smoke_releases(paths, waiting[:-1] if stays else waiting)
    if stays:
        say(f"smoke test of the server that is to stay: {end.tag}")
        standing.callback(stop_unless_current, paths, engine, end)
        smoke_release(paths, end, stays=True)


def stop_unless_current(paths: Paths, engine: Engine, release: Release) -> None:
    """What failed, or could not be compared, answers nobody."""
    if running_release(paths, engine, release.recipe) == release.tag != Releases(paths).current_tag(release.recipe):
        service.stop(paths, engine, release.recipe)


def first_is_current(paths: Paths, newest: Release) -> None:
    """The first release of a recipe that passed is promoted, unless `promote` refuses it for what it has lost, or its
    check `drift` had nothing to compare with: nobody asked for this promotion."""
    if not newest.smoke_passed or Releases(paths).current(newest.recipe):
        return
    compared = is_compared(newest)
    if why := quality_gate.refusal(paths, newest) if compared else "it was not compared with the stage below":
        say(f"{newest.tag} passed, and is not current: {why}")
        return
    require_consistent(paths, newest, finished=True)
    current.promote(paths, engine_of(paths), newest)
    say(f"{newest.tag} is the first release that passed, so it is current")
