"""What each task does: load, plan, execute, report. The only module that joins the others."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

from sparkpin import build as builder
from sparkpin import fetch as fetching
from sparkpin import host, hub, manifests, releases, retention, serve as serving, ui
from sparkpin import lock as locking
from sparkpin.checkpoint.build import build_checkpoint
from sparkpin.checkpoint.plan import make_plan
from sparkpin.engine import Engine
from sparkpin.errors import InputError, SmokeError
from sparkpin.pairing import Pairing, pair
from sparkpin.paths import Paths
from sparkpin.releases import Release, Releases
from sparkpin.smoke import run_smoke
from sparkpin.ui import say, show


def choose_recipe(paths: Paths, recipe: str | None, stack: str | None) -> str:
    """The recipe asked for, else the default one of the stack, else that of this machine's stack."""
    if recipe:
        return recipe
    return manifests.load_stack(paths.project, stack or host.default_stack(paths.project)).default_recipe


def pairings_of(
    recipe: str | None, stage: str | None, stack: str | None = None
) -> tuple[Paths, tuple[Pairing, ...]]:
    paths = Paths.from_env()
    return paths, pair(paths.project, choose_recipe(paths, recipe, stack), stage=stage, stack_name=stack)


def lock(*, stack: str | None, model: str | None) -> None:
    paths = Paths.from_env()
    everything = not stack and not model
    for name in [stack] if stack else names(paths.project / "pins/stacks") if everything else []:
        made = locking.lock_stack(paths, name, say)
        show(f"pins/stacks/{name}.lock: {len(made.debs)} Debian packages, {len(made.wheels)} wheels")
    for name in [model] if model else names(paths.project / "pins/models") if everything else []:
        locked = hub.lock_model(paths, name, say)
        for repository in locked.repositories.values():
            show(f"pins/models/{name}.lock: {repository.repo} at {repository.revision}: {len(repository.files)} files")


def names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))


def fetch(*, recipe: str | None, stack: str | None) -> None:
    paths, pairings = pairings_of(recipe, None, stack)
    last = pairings[-1]
    report = fetching.fetch_stack(paths, last.stack, last.stack_lock, say)
    show(f"stack {last.stack.name}: {report.files} files, {ui.size(report.bytes_total)} verified, "
         f"{ui.size(report.bytes_fetched)} fetched")
    for name, folder in hub.fetch_model(paths, last.model, last.model_lock, say).items():
        show(f"model {last.model.name}: {name} in {folder}")


def show_rendered(*, recipe: str | None, stage: str | None, stack: str | None) -> None:
    _, pairings = pairings_of(recipe, stage, stack)
    image = pairings[-1].rendered
    show(f"# {image.ref}\n# build key {image.key}\n{image.dockerfile.rstrip()}\n\n# The build sees these files and no network:")
    for file in image.context:
        show(f"#   {file.sha256[:12]} {ui.size(file.size):>10}  {file.path}")


def build(*, recipe: str | None, stage: str | None, stack: str | None) -> tuple[Release, ...]:
    made = build_releases(*pairings_of(recipe, stage, stack))
    report(made)
    if waiting := [release for release in made if release.state == "built"]:
        show(f"next: invoke smoke ({len(waiting)} not yet smoked)")
    return made


def build_releases(paths: Paths, pairings: tuple[Pairing, ...]) -> tuple[Release, ...]:
    engine = Engine.connect()
    records = Releases(paths)
    made = []
    for pairing in pairings:
        image = pairing.rendered
        if image.parent_key is None and not builder.is_built(paths, engine, image):
            fetching.fetch_stack(paths, pairing.stack, pairing.stack_lock, say)
        built = builder.build_image(paths, engine, pairing.stack, pairing.stack_lock, image, say)
        made.append(record(engine, records, pairing, built))
    return tuple(made)


def record(engine: Engine, records: Releases, pairing: Pairing, built: builder.BuiltImage) -> Release:
    """The release of a pairing: the one that is there when it holds these bytes, else a new one, tagged."""
    known = records.find(pairing.tag)
    if known and known.image != built.config_digest:
        say(f"{pairing.tag}: other bytes than recorded ({known.image} -> {built.config_digest}); it must be smoked anew")
        known = None
    release = known or Release(
        tag=pairing.tag,
        recipe=pairing.recipe.name,
        stage=pairing.stage.name,
        stack=pairing.stack.name,
        model=pairing.model.name,
        key=pairing.key,
        build_key=pairing.rendered.key,
        image=built.config_digest,
        diff_ids=built.diff_ids,
        size=built.size,
        checkpoint_key=pairing.checkpoint_key,
        argv=pairing.argv,
        env=pairing.env,
        created=releases.now(),
        build_seconds=built.seconds,
        state="built",
        smoke=None,
        inputs=pairing.inputs,
    )
    engine.tag(built.ref, release.tag)
    engine.tag(built.ref, f"sparkpin/{release.recipe}:{release.stage}")
    if not known:
        records.save(release)
    return release


def checkpoint(*, recipe: str | None, stage: str | None, stack: str | None, dry_run: bool) -> None:
    paths, pairings = pairings_of(recipe, stage, stack)
    last = pairings[-1]
    if dry_run:
        folders = hub.fetch_model(paths, last.model, last.model_lock, say)
        for line in make_plan(folders, last.model, last.steps).lines():
            show(line)
        return
    show(str(build_checkpoint(paths, last.model, last.model_lock, last.steps, say)))


def checkpoint_of(paths: Paths, release: Release) -> Path:
    """The checkpoint folder of a release, made when it is not there and the pins still give it."""
    for pairing in pair(paths.project, release.recipe, stage=release.stage):
        if pairing.checkpoint_key == release.checkpoint_key:
            return build_checkpoint(paths, pairing.model, pairing.model_lock, pairing.steps, say)
    folder = paths.checkpoints / release.model / release.checkpoint_key[:16]
    if not folder.is_dir():
        raise InputError(
            f"the checkpoint of {release.tag} ({folder}) is gone, and the pins give another one now",
            next_step=f"invoke build --recipe {release.recipe} --stage {release.stage}",
        )
    return folder


def smoke(*, tag: str | None, stage: str | None, recipe: str | None) -> tuple[Release, ...]:
    paths = Paths.from_env()
    records = Releases(paths)
    if tag:
        wanted = [records.get(tag)]
    elif stage:
        newest = sorted(records.of_recipe(choose_recipe(paths, recipe, None)), key=lambda release: release.created)
        wanted = [release for release in newest if release.stage == stage][-1:]
        if not wanted:
            raise InputError(f"no release of stage {stage!r} is built", next_step=f"invoke build --stage {stage}")
    else:
        wanted = [release for release in records.all() if release.state == "built"
                  and recipe in (None, release.recipe)]
    if not wanted:
        show("nothing to smoke: every release that is built has been smoked (invoke smoke TAG repeats one)")
        return ()
    done = smoke_releases(paths, tuple(wanted))
    report(done)
    finish(done)
    return done


def smoke_releases(paths: Paths, wanted: tuple[Release, ...]) -> tuple[Release, ...]:
    engine = Engine.connect()
    records = Releases(paths)
    return tuple(
        records.smoked(release.tag, run_smoke(paths, engine, release, checkpoint_of(paths, release), say))
        for release in wanted
    )


def finish(done: tuple[Release, ...]) -> None:
    """Say what to type next; a failed smoke test is the task's failure."""
    failed = [release for release in done if not release.smoke_passed]
    for release in failed:
        show(f"{release.tag}: " + "; ".join(release.smoke_failures))
    if failed:
        raise SmokeError(
            f"{len(failed)} of {len(done)} smoke tests failed; their images are kept, marked failed",
            next_step=f"read {Releases.evidence_name(failed[0])}/server.log below SPARKPIN_HOME/releases",
        )
    if done:
        show(f"next: invoke promote {done[-1].tag}")


def report(rows: tuple[Release, ...]) -> None:
    ui.table(
        ("stage", "tag", "image", "size", "build", "smoke"),
        [
            (r.stage, r.tag, r.image.removeprefix("sha256:")[:12], ui.size(r.size), ui.seconds(r.build_seconds), r.smoke_text)
            for r in rows
        ],
    )


def images(*, as_json: bool) -> None:
    paths = Paths.from_env()
    rows = retention.rows(paths, Engine.connect())
    if as_json:
        show(json.dumps(rows, indent=2, sort_keys=True))
        return
    ui.table(
        ("tag", "state", "smoke", "image", "size", "own size", "created"),
        [
            (r["tag"], r["state"], r["smoke"], (r["image"] or "missing").removeprefix("sha256:")[:12], ui.size(r["size"]),
             ui.size(r["unique_size"]), r["created"])
            for r in rows
        ],
    )


def promote(tag: str) -> None:
    release = retention.promote(Paths.from_env(), Engine.connect(), tag)
    show(f"current release of {release.recipe}: {release.tag}\nnext: invoke serve")


def rollback(*, recipe: str | None) -> None:
    paths = Paths.from_env()
    release = retention.rollback(paths, Engine.connect(), choose_recipe(paths, recipe, None))
    show(f"back to {release.tag}: image {release.image}, checkpoint {release.checkpoint_key[:16]}")
    show(f"flags: {shlex.join(release.argv)}\nnext: invoke serve")


def prune(*, keep: int) -> None:
    freed = retention.prune(Paths.from_env(), Engine.connect(), keep, say)
    show(f"removed {len(freed.tags)} releases, freed {ui.size(freed.bytes)}")


def serve(*, recipe: str | None, release: str | None, port: int | None) -> None:
    paths = Paths.from_env()
    records = Releases(paths)
    if release:
        chosen = records.get(release)
    else:
        name = choose_recipe(paths, recipe, None)
        current = records.current(name)
        if not current:
            raise InputError(f"recipe {name!r} has no current release", next_step="invoke promote TAG (see invoke images)")
        chosen = current
    served = serving.start(Engine.connect(), chosen, checkpoint_of(paths, chosen), port=port, say=say)
    show(f"{chosen.tag} answers at {served.url}\nnext: invoke stop")


def stop(*, recipe: str | None) -> None:
    for name in serving.stop(Engine.connect(), recipe, say):
        show(f"stopped {name}")
