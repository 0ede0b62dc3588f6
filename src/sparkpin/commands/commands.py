"""What each task does: load, plan, hand over to `jobs` and the parts, report."""

from __future__ import annotations

import contextlib
import json
import shlex
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from sparkpin.build import cross_build
from sparkpin.build import reproduce as reproducing
from sparkpin.build.lost_files import how_to_get
from sparkpin.build.make import build_releases, checkpoint_of, engine_of, smoke_releases
from sparkpin.build.make import rebuild as remake
from sparkpin.build.pair import Pairing, pair
from sparkpin.bundle import copy as transfer
from sparkpin.bundle import export as exporting
from sparkpin.bundle import take_in
from sparkpin.checkpoint import report as checkpoint_report
from sparkpin.checkpoint.build import build_checkpoint, disk_line, plan_checkpoint, verify_built
from sparkpin.checkpoint.plan import all_steps, checkpoint_steps, require
from sparkpin.commands import tables
from sparkpin.community import check as recipe_checks
from sparkpin.core import files, prune_lock, terminal
from sparkpin.core.errors import (
    DifferenceError,
    EngineError,
    HostError,
    InputError,
    ManifestError,
    SmokeError,
    SparkpinError,
)
from sparkpin.core.paths import Paths
from sparkpin.core.progress import waiting
from sparkpin.core.terminal import say, show
from sparkpin.evidence import attest as attesting
from sparkpin.evidence import signing
from sparkpin.fetch import lock_community_mod, lock_model
from sparkpin.fetch import lock_stack as locking
from sparkpin.fetch import model as hub
from sparkpin.fetch import stack as fetching
from sparkpin.fetch.store import Store
from sparkpin.history.prune import plan as pruning
from sparkpin.host import machine as host
from sparkpin.pins import manifests, schema
from sparkpin.pins.precedence import overruled
from sparkpin.releases import current as retention
from sparkpin.releases import keep as pinned
from sparkpin.releases import quality_gate
from sparkpin.releases.kept_inputs import project_of
from sparkpin.releases.record import Release, Releases
from sparkpin.serve import service as serving
from sparkpin.serve import status as serving_tasks
from sparkpin.serve.choose_loader import with_loader
from sparkpin.serve.served import running_release, status
from sparkpin.serve.switching import Detached
from sparkpin.smoke.choice import obstacle, owes, uses_gpu
from sparkpin.smoke.inspect import run as inspecting
from sparkpin.smoke.server import clear_leftovers, leftovers


def choose_recipe(paths: Paths, recipe: str | None, stack: str | None) -> str:
    """The recipe asked for, else the default one of the stack, else that of this machine's stack."""
    return recipe or host.default_recipe(paths.project, stack)


def pairings_of(recipe: str | None, stage: str | None, stack: str | None = None) -> tuple[Paths, tuple[Pairing, ...]]:
    paths = Paths.from_env()
    return paths, pair(paths.project, choose_recipe(paths, recipe, stack), stage=stage, stack_name=stack)


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


def lock(*, stack: str | None, model: str | None, mod: str | None = None, keep_layers: bool) -> None:
    if mod:
        if stack or model:
            raise InputError(f"--mod {mod} goes without --stack and --model", next_step=f"invoke lock --mod {mod}")
        archive = lock_community_mod.lock_mod(Paths.from_env(), mod, say).archive
        show(f"community/{archive.file}: {archive.size} bytes, sha256 {archive.sha256}, of {archive.version}")
        return
    if stack and model:
        raise InputError(
            f"--stack {stack} locks that stack only, --model {model} that model only",
            next_step=f"one after the other: invoke lock --stack {stack}, then invoke lock --model {model}",
        )
    paths = Paths.from_env()
    everything = not stack and not model
    for name in [stack] if stack else names(paths.project / "pins/stacks") if everything else []:
        made = locking.lock_stack(paths, name, say, keep_layers=keep_layers)
        on_top = f", {len(made.updates)} of them on top of the former layers" if made.updates else ""
        show(f"pins/stacks/{name}.lock: {len(made.debs)} Debian packages, {len(made.wheels)} wheels{on_top}")
    for name in [model] if model else names(paths.project / "pins/models") if everything else []:
        if not model and not (paths.project / f"pins/models/{name}.lock").is_file():
            show(f"pins/models/{name}.yaml has no lock; to make it: invoke lock --model {name}")
            continue
        locked = lock_model.lock_model(paths, name, say)
        for repository in locked.repositories.values():
            parts = f"{len(repository.files)} files, {len(repository.headers)} headers"
            if repository.tensors:
                size = terminal.size(sum(tensor.size for tensor in repository.tensors))
                parts += f", {len(repository.tensors)} tensors of {size}"
            show(f"pins/models/{name}.lock: {repository.repo} at {repository.revision}: {parts}")


def names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))


def fetch(*, recipe: str | None, stack: str | None) -> None:
    paths, pairings = pairings_of(recipe, None, stack)
    last = pairings[-1]
    wanted = [(last.stack, last.stack_lock)]
    if (machine := cross_build.this_platform()) in last.stack.build_on:
        wanted += filter(None, [cross_build.stand_in_debs(paths, last.stack, machine)])
    for one, lock in wanted:
        report = fetching.fetch_stack(paths, one, lock, say, partial(how_to_get, paths))
        what = "stack" if one is last.stack else "root file system to build it in, stack"
        show(
            f"{what} {one.name}: {report.files} files, {terminal.size(report.bytes_total)} verified, "
            f"{terminal.size(report.bytes_fetched)} fetched"
        )
    places = hub.fetch_model(paths, last.model, last.model_lock, say)
    for name, folder in places.folders.items():
        show(f"model {last.model.name}: {name} in {folder}")
    for name, tensors in places.tensors.items():
        show(f"model {last.model.name}: {len(tensors)} tensors of {name} in {paths.store}")


def show_rendered(*, recipe: str | None, stage: str | None, stack: str | None) -> None:
    _, pairings = pairings_of(recipe, stage, stack)
    image = pairings[-1].rendered
    show(f"# {image.ref}\n{image.dockerfile.rstrip()}\n")
    show("# The build sees these files and no network:")
    for file in image.context:
        show(f"#   {file.sha256[:12]} {terminal.small_size(file.size):>10}  {file.path}")


def build(*, recipe: str | None, stage: str | None, stack: str | None, offline: bool) -> tuple[Release, ...]:
    paths, pairings = pairings_of(recipe, stage, stack)
    say_overruled(pairings[-1].recipe, pairings[-1].stack, pairings[-1].chain)
    say_mistakes(paths, pairings[-1])
    say_chosen(pairings[-1])
    made = build_releases(paths, pairings, offline=offline)
    tables.show_built(made)
    next_smoke(paths, made)
    return made


def say_overruled(recipe: schema.Recipe, stack: schema.Stack, chain: Sequence[schema.Stage]) -> None:
    for line in overruled(recipe, stack, chain):
        say(f"note: {line}")


def say_mistakes(paths: Paths, pairing: Pairing) -> None:
    """What vLLM will refuse, before images and checkpoints are made for it."""
    for finding in recipe_checks.mistakes(paths.project, pairing):
        say(f"warning: recipes/{pairing.recipe.name}.yaml: {str(finding).removeprefix('error: ')}")


def say_chosen(pairing: Pairing) -> None:
    for choice in pairing.chosen:
        say(choice.line)
    if pairing.patched:
        say(f"note: community mods edit what is installed, in layers of their own: {', '.join(pairing.patched)}")


def say_overruled_of(paths: Paths, release: Release) -> None:
    """Of the files that a release was made from; nothing where they are not kept: serving needs none of them."""
    with contextlib.suppress(SparkpinError), project_of(paths, release) as project:
        recipe = manifests.load_recipe(project, release.recipe)
        stack, chain = manifests.load_stack(project, recipe.stack), manifests.load_chain(project, release.stage)
        say_overruled(recipe, stack, chain)


def next_smoke(paths: Paths, made: tuple[Release, ...]) -> bool:
    """Say that releases of a recipe wait for their smoke test; False when none does."""
    waiting = [release for release in made if release.state == "built"]
    if waiting:
        last = waiting[-1]
        of = "" if last.recipe == choose_recipe(paths, None, None) else f" --recipe {last.recipe}"
        load = " --load" if (why := obstacle(paths, engine_of(paths), last)) else ""
        here = f"; here they can only be inspected: {why}" if why else ""
        show(f"next: invoke smoke{of}{load} ({len(waiting)} of these not yet smoked{here})")
    return bool(waiting)


def checkpoint(
    *, recipe: str | None, model: str | None, stage: str | None, stack: str | None, dry_run: bool, verify: bool
) -> None:
    """Of a recipe, or of a model alone: with all steps that its pin allows, or those of a stage's chain."""
    if model and (recipe or stack):
        raise InputError(f"--model {model} goes without --recipe and --stack", next_step="leave one of them out")
    if dry_run and verify:
        raise InputError(
            "--dry-run tells what would be built, --verify reads what is built: one of them",
            next_step="leave --dry-run out: --verify changes no checkpoint either",
        )
    if model:
        paths = Paths.from_env()
        pin = manifests.load_model(paths.project, model)
        steps = checkpoint_steps(manifests.load_chain(paths.project, stage)) if stage else all_steps(pin)
        require(pin, steps)  # before the lock, which could not help
        lock = manifests.load_model_lock(paths.project, pin)
    else:
        paths, pairings = pairings_of(recipe, stage, stack)
        pin, lock, steps = pairings[-1].model, pairings[-1].model_lock, pairings[-1].steps
    if dry_run:
        plan = plan_checkpoint(paths, pin, lock, steps, say)
        for line in [*checkpoint_report.summary(plan), disk_line(paths, pin, lock, plan)]:
            show(line)
        show()
        terminal.table(checkpoint_report.COLUMNS, checkpoint_report.table(plan.rows))
    elif verify:
        show(f"{verify_built(paths, pin, lock, steps, say)}: every byte is that of its sources")
    else:
        show(str(build_checkpoint(paths, pin, lock, steps, say)))


def waiting_for_smoke(paths: Paths, made: Sequence[Release], *, load: bool = False) -> tuple[Release, ...]:
    """Those that no smoke test has told what it could here, and those that failed."""
    if all(release.smoke_passed for release in made):
        return ()
    engine = engine_of(paths)
    return tuple(r for r in made if r.smoke_failed or owes(paths, engine, r, load=load))


def smoke(*, tag: str | None, stage: str | None, recipe: str | None, load: bool) -> tuple[Release, ...]:
    paths = Paths.from_env()
    records = Releases(paths)
    if recipe:
        require_recipe(paths, records, recipe)
    if tag:
        wanted = [records.get(tag)]
    elif stage:
        wanted = [newest_of_stage(paths, choose_recipe(paths, recipe, None), stage)]
    else:
        known = [release for release in records.all() if recipe in (None, release.recipe)]
        fresh = [release for release in known if release.state in ("built", "inspected")]
        waiting = waiting_for_smoke(paths, fresh, load=load)
        wanted = with_image(paths, waiting)
        if not wanted:
            show(nothing_to_smoke(recipe, known=len(known), left_out=len(waiting)))
            return ()
    done = smoke_releases(paths, tuple(wanted), load=load)
    tables.show_built(done)
    finish(records, done)
    return done


def require_recipe(paths: Paths, records: Releases, name: str) -> list[ManifestError]:
    """A recipe whose file is gone is known as long as a release of it is there. InputError for any other.

    What of its records cannot be read, and why.
    """
    known, faults = records.readable(name)
    if not known and not faults:
        manifests.load_recipe(paths.project, name)
    return faults


def nothing_to_smoke(recipe: str | None, *, known: int, left_out: int) -> str:
    """known: releases there are; left_out: those that wait for their smoke test and have no image."""
    of = f" of {recipe}" if recipe else ""
    if left_out:
        return f"nothing smoked: {terminal.count(left_out, 'release')}{of} not yet smoked, none of them with an image"
    if not known:
        return f"nothing to smoke: no release{of} is built; next: invoke build{f' --recipe {recipe}' if recipe else ''}"
    return f"nothing to smoke: every release{of} has been smoked (invoke smoke --release TAG repeats one)"


def with_image(paths: Paths, waiting: Sequence[Release]) -> list[Release]:
    """Those whose image the engine has: nobody asked for the others by name, so they do not stop the rest."""
    if not waiting:
        return []
    engine = engine_of(paths)
    there = [release for release in waiting if engine.image(release.tag)]
    gone = [release.tag for release in waiting if release not in there]
    if gone:
        show(f"left out, the engine has not {tables.images_gone(gone)}")
    return there


def require_trust(paths: Paths, release: Release, *, trusted: bool) -> None:
    """An imported release's build steps are somebody else's, and making a root file system runs them as root."""
    if not trusted and exporting.is_from_elsewhere(paths, release):
        raise InputError(
            f"{release.tag} came from another machine: building it runs, as root, what its bundle says",
            next_step=f"`invoke verify {release.tag}` says who signed it; then the same command with --trust",
        )


def rebuild(tag: str, *, trusted: bool) -> None:
    paths = Paths.from_env()
    release = Releases(paths).get(tag)
    require_trust(paths, release, trusted=trusted)
    remake(paths, release)
    show(f"{release.tag} is there: image {release.image}, checkpoint {release.checkpoint_key[:16]}")


def newest_of_stage(paths: Paths, recipe: str, stage: str) -> Release:
    for release in reversed(Releases(paths).of_recipe(recipe)):
        if release.stage == stage:
            return release
    manifests.load_stage(paths.project, stage)
    raise InputError(
        f"no release of stage {stage!r} is built", next_step=f"invoke build --recipe {recipe} --stage {stage}"
    )


def reproduce(*, tag: str | None, stage: str | None, recipe: str | None, trusted: bool) -> None:
    """Build a release again from its record; DifferenceError unless every image came out identical."""
    paths = Paths.from_env()
    records = Releases(paths)
    if tag:
        release = records.get(tag)
    else:
        name = choose_recipe(paths, recipe, None)
        release = newest_of_stage(paths, name, stage or manifests.load_recipe(paths.project, name).stage)
    require_trust(paths, release, trusted=trusted)
    say(f"building {release.tag} again from its record, in an engine of its own")
    try:
        original = engine_of(paths)
    except (EngineError, HostError):  # it is asked for texts of files that differ, and for nothing else
        original = None
    result = reproducing.reproduce(paths, release, original, say)
    files.write_json(records.evidence(release) / "reproduced.json", reproducing.to_json(result))
    terminal.table(
        ("stage", "verdict", "image", "layers", "build"),
        [(s.stage, s.verdict, terminal.digest(s.got), s.layers, terminal.seconds(s.seconds)) for s in result.stages],
    )
    for stage_result in result.stages:
        if stage_result.verdict != "identical":
            word = "equivalent except" if stage_result.verdict == "equivalent" else "different"
            show(f"{stage_result.stage}: {word}:")
            for line in stage_result.lines:
                show(f"  {line}")
    for note in result.notes:
        show(f"note: {note}")
    if result.verdict != "identical":
        raise DifferenceError(
            f"{release.tag} came out {result.verdict}: not the recorded bytes",
            next_step="what differs stands above; a build step that reads time, chance or the machine makes it so",
        )
    show(
        f"identical: {terminal.count(len(result.stages), 'image')} of {release.tag}, built with Docker {result.engine}"
    )


def how_to_carry(records: Releases, release: Release) -> str:
    """To a machine that can run it. An inspection makes no checkpoint, and a bundle wants one."""
    first = (
        "" if records.checkpoint(release).is_dir() else f"invoke rebuild {release.tag} (makes its checkpoint), then "
    )
    return f"{first}invoke export {release.tag} -o {release.name}.tar, and there invoke import and invoke smoke"


def finish(records: Releases, done: tuple[Release, ...]) -> None:
    """Say what to type next; a failed smoke test is the task's failure."""
    failed = [release for release in done if release.smoke_failed]
    for release in failed:
        for failure in release.smoke_failures:
            show(f"{release.tag}: {failure}")
    if failed:
        raise SmokeError(
            f"{len(failed)} of {len(done)} smoke tests failed; their images are kept, marked failed",
            next_step=f"read {records.evidence(failed[0])}/smoke/{failed[0].smoke_log}",
        )
    if done:
        newest = done[-1]
        if not newest.smoke_passed:
            show(f"next, where it can run: {how_to_carry(records, newest)}")
            return
        is_current = newest.tag == records.current_tag(newest.recipe)
        serve_it = host.serve_command(records.paths.project, newest.recipe)
        show(f"next: {serve_it}" if is_current else f"next: invoke promote {newest.tag}, then {serve_it}")


def images(*, as_json: bool) -> None:
    """What can be read of the releases; then ManifestError for a record that is damaged."""
    paths = Paths.from_env()
    with waiting(say, "asking the engine for its images"):
        rows, shared = retention.rows(paths, engine_of(paths))
    if as_json:
        show(json.dumps(rows, indent=2, sort_keys=True))
    elif rows:
        tables.show_images(rows, shared)
    else:
        show("no release yet; next: invoke up")
    faults = Releases(paths).faults()
    for fault in faults[1:]:
        say(f"damaged, too: {fault}")
    if faults:
        raise faults[0]


def attest(tag: str) -> None:
    """Make a release's SBOM, statement and, with a key, signature anew."""
    paths = Paths.from_env()
    with prune_lock.claim(paths, say):
        release, keys = Releases(paths).get(tag), signing.Keys.from_env()
        made = attesting.attest(paths, release, keys)
    for path in made.files:
        show(str(path))
    if made.removed:
        show(attesting.REMOVED.format(release.tag))
    if keys.signing:
        show(f"signed with {keys.signing}: {made.signer}")
    elif made.signer:
        show(f"the signature from before stays, it is over this very statement: {made.signer}")
    if not keys.signing:
        show(f"not signed now: no key in {signing.places(signing.SIGNING_KEY)}")


def verify(subject: str, *, deep: bool, require_signature: bool) -> None:
    """One line a check, then what was not checked; IntegrityError when one is wrong."""
    from sparkpin.bundle import form
    from sparkpin.evidence import imagecheck  # slow to import, and no other task needs them
    from sparkpin.evidence import verify as verifying

    paths = Paths.from_env()
    sign = "on the machine that exported it: name a key in SPARKPIN_SIGNING_KEY, invoke attest, and export it again"
    if Path(subject).is_file():
        how = "get the bundle again from where it was exported"
        if deep:
            say("--deep adds nothing for a bundle: all of it is read and hashed in any case")
        with form.open_bundle(Path(subject), say) as opened:
            count = len(opened.index.members)
            checks = [verifying.Check("bundle", "ok", f"{count} members, each of its size and hash"), *opened.checks]
            for what, there in (
                (verifying.PACKAGES, opened.index.store),
                (verifying.MODELS, opened.index.store),
                (verifying.LAYERS, opened.index.image),
            ):
                said = "in the bundle, each with its hash" if there else "not in the bundle"
                checks.append(verifying.Check(what, "ok" if there else "open", said))
            said = "not held against its sources" if opened.index.checkpoint else "not in the bundle"
            checks.append(verifying.Check(verifying.CHECKPOINT, "open", said))
    else:
        try:
            release = Releases(paths).get(subject)
        except InputError as error:
            raise InputError(f"{error.message}, and no file of that name", next_step=error.next_step) from None
        how = (
            f"invoke attest {release.tag}, if only statement, SBOM or signature are at fault; else "
            f"{retention.how_to_rebuild(release)}"
        )
        key = "" if signing.Keys.from_env().signing else f"name a key in {signing.places(signing.SIGNING_KEY)}; then "
        sign = f"{key}invoke attest {release.tag}"
        engine, evidence = engine_of(paths), imagecheck.evidence_of(paths, release)
        checks = [*verifying.check_evidence(evidence), imagecheck.check_loaded(engine, release)]
        if deep:
            checks.append(imagecheck.check_fetched(paths, release, evidence.records))
            checks += imagecheck.check_model(paths, release, say)
            checks.append(imagecheck.check_saved(paths, engine, release, say))
    if require_signature:
        checks = [verifying.demanded(check, sign) for check in checks]
    for check in checks:
        show(check.line)
    show(verifying.conclusion(checks))
    verifying.require(checks, subject, next_step=how, told=True)


def inspect(subject: str, *, sm: str, platform: str, everything: bool, as_json: bool) -> None:
    paths = Paths.from_env()
    inspecting.check(paths, subject, sm=sm, platform=platform)
    engine = None if Path(subject).is_dir() else engine_of(paths)
    result = inspecting.inspect(paths, engine, subject, sm=sm, platform=platform, say=say)
    inspecting.show(result, everything=everything, as_json=as_json)


def promote(tag: str, *, accept_loss: str = "") -> None:
    """accept_loss: why a greater loss of quality than the stage allows is taken; it is kept with the release."""
    paths = Paths.from_env()
    accept_loss = accept_loss.strip()  # blanks are no reason
    told = quality_gate.check(paths, Releases(paths).get(tag), accepted=accept_loss)
    release = retention.promote(paths, engine_of(paths), tag)
    show(f"current release of {release.recipe}: {release.tag}")
    for line in told:
        show(line)
    if accept_loss:
        quality_gate.note_accepted(paths, release, accept_loss)
    next_serve(paths, release)


def rollback(*, recipe: str | None, serve_it: bool = False, drain: int | None = None) -> None:
    """serve_it: serve what came back, too; where it does not become ready, nothing has changed."""
    paths = Paths.from_env()
    name = choose_recipe(paths, recipe, None)
    records = Releases(paths)
    for fault in require_recipe(paths, records, name):
        say(f"passed over: {fault}")
    former = retention.require_current(records, name)
    engine = engine_of(paths)
    running = running_release(paths, engine, name)
    release = retention.rollback(paths, engine, name, say)
    for line in went_back(former, release, running):
        show(line)
    if not serve_it:
        next_serve(paths, release)
        return
    try:
        serve(recipe=name, release=release.tag, port=None, drain=drain)
    except SparkpinError:
        retention.promote(paths, engine, former.tag)
        show(f"current again, since {release.tag} could not be served: {former.tag}")
        raise


def went_back(former: Release, release: Release, running: str | None) -> list[str]:
    """What a rollback did. running: tag of what was served, which need not be what was current."""
    lines = [
        f"back from {former.tag}",
        f"to {release.tag}: image {terminal.digest(release.image)}, checkpoint {release.checkpoint_key[:12]}",
        *changed_flags(former.argv, release.argv),
    ]
    if running not in (None, former.tag, release.tag):
        lines.append(
            f"note: {running} was served, and {former.tag} was current, which rollback goes by; if that was meant to "
            f"come back: invoke promote {former.tag}, then invoke serve --release {former.tag}"
        )
    return lines


def changed_flags(before: tuple[str, ...], after: tuple[str, ...]) -> list[str]:
    """One line for each flag, with its values, that went or came."""
    old, new = flags(before), flags(after)
    if old == new:
        return ["flags: the same"]
    return [f"  - {flag}" for flag in old if flag not in new] + [f"  + {flag}" for flag in new if flag not in old]


def flags(argv: tuple[str, ...]) -> list[str]:
    """Each flag with the words that follow it."""
    starts = [place for place, word in enumerate(argv) if word.startswith("--")]
    ends = [*starts[1:], len(argv)]
    return [shlex.join(argv[start:end]) for start, end in zip(starts, ends, strict=True)]


def next_serve(paths: Paths, release: Release) -> None:
    """What answers now goes on answering until `serve` changes it."""
    running = running_release(paths, engine_of(paths), release.recipe)
    if running == release.tag:
        show("it is being served already")
    else:
        until = f" (until then {running} still answers)" if running else ""
        show(f"next: {host.serve_command(paths.project, release.recipe)}{until}")


def export(tag: str, output: str, *, store: bool, checkpoint: bool, image: bool) -> None:
    paths = Paths.from_env()
    release = Releases(paths).get(tag)
    if not output:
        raise InputError("which file?", next_step=f"invoke export {release.tag} -o {release.name}.tar")
    wanted = exporting.BundleParts(store=store, checkpoint=checkpoint, image=image)
    size = exporting.export(paths, lambda: engine_of(paths), release, Path(output), wanted, say)
    show(f"{output}: {release.tag}, {terminal.size(size)}")
    if not store and not checkpoint:
        show(
            "without its checkpoint: the other machine makes it from the model's files, which it has or fetches "
            "(--with-store and --with-checkpoint take along what a machine without network needs)"
        )
    show(f"next, on the other machine: invoke import {Path(output).name}")


def import_bundle(file: str, *, signed: bool) -> None:
    paths = Paths.from_env()
    done = take_in.import_bundle(paths, engine_of(paths), Path(file), say, signed=signed)
    for check in done.checks:
        show(check.line)
    show(f"{done.release.tag} is here, {done.release.state}: what another machine's smoke test said is no proof here")
    if done.release.smoke_passed:
        show(f"next: invoke promote {done.release.tag}, then {host.serve_command(paths.project, done.release.recipe)}")
    else:
        show(f"next: invoke smoke --release {done.release.tag}, then invoke serve --release {done.release.tag}")


def copy(tag: str, to: str) -> None:
    paths = Paths.from_env()
    release = Releases(paths).get(tag)
    if not to:
        raise InputError("to which engine?", next_step=f"invoke copy {release.tag} --to ssh://user@host")
    sent = transfer.copy(paths, engine_of(paths), release, to, say)
    show(
        f"{release.tag} is at {to}: sent {terminal.count(sent.layers, 'layer')}, {terminal.size(sent.bytes)}; "
        f"{terminal.count(sent.skipped, 'layer')} were there"
    )
    record = f"{release.name}.tar"
    show(f"next, for its record: invoke export {release.tag} --no-image -o {record}, and there: invoke import {record}")


def pin(tag: str, *, note: str) -> None:
    release, made = pinned.pin(Releases(Paths.from_env()), tag, note)
    show(f"{release.tag} is {made.text}")
    show(f"no prune removes it until: invoke unpin {release.tag}")


def unpin(tag: str) -> None:
    records = Releases(Paths.from_env())
    was_pinned = pinned.unpin(records, tag)
    show(f"{records.get(tag).tag} is {'no longer' if was_pinned else 'not'} pinned")


def prune(*, keep: int, dry_run: bool, store: bool) -> None:
    paths = Paths.from_env()
    engine = engine_of(paths)
    if dry_run:
        ignored = leftovers(paths, engine)
    else:
        clear_leftovers(paths, engine, say)
        ignored = frozenset()
    now = time.time()
    done = pruning.prune(paths, engine, keep, say, now=now, dry_run=dry_run, store=store, ignored=ignored)
    tables.show_prune(done, dry_run=dry_run, store=store)


def serve(
    *,
    recipe: str | None,
    release: str | None,
    port: int | None,
    host: str | None = None,
    stack: str | None = None,
    drain: int | None = None,
    unit: bool = False,
) -> None:
    """unit: print a systemd unit that does so after a reboot, and serve nothing. drain: as `sparkpin.serve.start`."""
    paths = Paths.from_env()
    records = Releases(paths)
    if release:
        chosen = records.get(release, recipe)
        if unit:
            raise InputError(
                "--unit goes without --release: the unit serves what is current then",
                next_step=f"invoke promote {chosen.tag}, then invoke serve --unit --recipe {chosen.recipe}",
            )
    else:
        name = choose_recipe(paths, recipe, stack)
        require_recipe(paths, records, name)
        chosen = retention.require_current(records, name)
    if unit:
        serving_tasks.show_unit(paths, chosen.recipe, port=port, host=host)
        return
    engine = engine_of(paths)
    if why := obstacle(paths, engine, chosen):
        raise InputError(
            f"{chosen.tag} cannot be served here: {why}",
            next_step=f"where it can run: {how_to_carry(records, chosen)}",
        )
    if not chosen.smoke_passed:
        say(f"warning: {chosen.tag} is {chosen.state}: no smoke test stands behind its answers")
    say_overruled_of(paths, chosen)
    gpus, checkpoint = uses_gpu(paths, chosen), checkpoint_of(paths, chosen)
    chosen = with_loader(paths, chosen, checkpoint, say, gpus=gpus)
    try:
        served = serving.start(paths, engine, chosen, checkpoint, port=port, host=host, gpus=gpus, drain=drain, say=say)
    except Detached as detached:
        show(f"detached: {detached}\nnext: invoke status, invoke logs --follow")
        return
    for line in serving_tasks.told(paths, served):
        show(line)
    current = records.current(chosen.recipe)
    if current and current.tag != chosen.tag:
        show(f"note: current is {current.tag}, and rollback goes by that; this one: invoke promote {chosen.tag}")


def stop(*, recipe: str | None) -> None:
    paths = Paths.from_env()
    engine = engine_of(paths)
    clear_leftovers(paths, engine, say)
    stopped = serving.stop(paths, engine, recipe, say)
    for name in stopped:
        show(f"stopped {name}")
    if not stopped:
        show("nothing is served")
        for served in status(engine):
            show(f"not touched: {served.container}, {served.release} of the home {served.home or '(not known)'}")


def server_status(*, as_json: bool) -> None:
    paths = Paths.from_env()
    serving_tasks.status(paths, engine_of(paths), as_json=as_json)


def server_logs(*, recipe: str | None, lines: int, follow: bool) -> None:
    paths = Paths.from_env()
    serving_tasks.logs(paths, engine_of(paths), recipe, lines=lines, follow=follow)
