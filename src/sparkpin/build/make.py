"""The parts joined: pairings become images and releases, releases get their checkpoint and their smoke test."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from sparkpin.build import cross_build
from sparkpin.build import image as builder
from sparkpin.build.checkpoint import build_checkpoint
from sparkpin.build.consistent import require_consistent
from sparkpin.build.origin import adopt, is_brought, ready_checkpoint
from sparkpin.build.pair import Pairing, pair
from sparkpin.build.record import check_form, records_of
from sparkpin.build.render import RenderedImage
from sparkpin.build.reproduce import require_inputs
from sparkpin.core import locks
from sparkpin.core.errors import CheckpointError, EngineError, InputError, SmokeError
from sparkpin.core.paths import Paths
from sparkpin.core.tags import stage_tag
from sparkpin.core.terminal import say
from sparkpin.fetch import stack as fetching
from sparkpin.host.containers import Container
from sparkpin.host.engine import Engine, engine_of
from sparkpin.host.fingerprint import Fingerprint, read_fingerprint
from sparkpin.pins.schema import Stack, StackLock
from sparkpin.releases import record as releases
from sparkpin.releases.kept_inputs import KeptInputs, project_of
from sparkpin.releases.record import Release, Releases
from sparkpin.releases.runs_here import obstacle, uses_gpu
from sparkpin.serve import memory_limit
from sparkpin.serve.launch import LaunchOrder, reached, was_stopped
from sparkpin.serve.switching import Test
from sparkpin.smoke.evidence import kept
from sparkpin.smoke.server import Place, alone

Joined = Callable[[Path], contextlib.AbstractContextManager[Sequence[Place]]]
"""Machines for the nodes of a release, which has this checkpoint here."""


@contextlib.contextmanager
def at_work(paths: Paths) -> Iterator[Engine]:
    """The engine, while `prune` is kept from taking what is fetched and made for a release."""
    with locks.claim(paths, say):
        yield engine_of(paths)


def fetch_missing(paths: Paths, engine: Engine, pairings: Sequence[Pairing], *, offline: bool = False) -> None:
    """What the images of a chain still need of its stack's lock, and of the stack that stands in for it where the
    engine's machine is another; nothing for images that are there. offline: what is missing is an error.
    """
    for pairing in pairings:
        fetch_for(paths, engine, pairing.rendered, pairing.stack, pairing.stack_lock, offline=offline)


def fetch_for(
    paths: Paths, engine: Engine, image: RenderedImage, stack: Stack, stack_lock: StackLock, *, offline: bool = False
) -> None:
    """As `fetch_missing`, for one image."""
    if image.parent_key is not None or builder.is_built(paths, engine, image):
        return  # what stands on an image of ours needs nothing else
    cross_build.require_own_uv(image, engine.platform)  # before gigabytes are fetched for nothing
    fetch_locked(paths, stack, stack_lock, engine.platform, offline=offline)


def fetch_locked(paths: Paths, stack: Stack, stack_lock: StackLock, machine: str, *, offline: bool = False) -> None:
    """All of a lock, and what stands in for it where images are made on a machine of another platform."""
    native = cross_build.stand_in_debs(paths, stack, machine)
    for one, lock in filter(None, ((stack, stack_lock), native)):
        if offline:
            fetching.require_fetched(paths, lock)
        else:
            fetching.fetch_stack(paths, one, lock, say)


def build_images(paths: Paths, engine: Engine, pairings: Sequence[Pairing]) -> tuple[builder.BuiltImage, ...]:
    return tuple(builder.build_image(paths, engine, pairing.rendered, say) for pairing in pairings)


def build_releases(paths: Paths, engine: Engine, pairings: Sequence[Pairing]) -> Iterator[Release]:
    """Build what is not built; each release comes, recorded, as soon as its image is there."""
    for pairing in pairings:
        yield record(paths, engine, pairing, builder.build_image(paths, engine, pairing.rendered, say))


def record(paths: Paths, engine: Engine, pairing: Pairing, built: builder.BuiltImage) -> Release:
    """The release of a pairing: the one that is there when it holds these bytes, else a new one, tagged."""
    records = Releases(paths)
    known = records.find(pairing.tag)
    if known and known.image != built.config_digest:
        say(
            f"{pairing.tag}: other bytes than recorded ({known.image} -> {built.config_digest}); it must be smoked anew"
        )
        known = None
    if known and is_brought(paths, known):
        say(f"{pairing.tag}: a bundle brought it, and this machine has built it now; it must be smoked anew")
        known = None
    release = known or new_release(pairing, built, read_fingerprint(engine.version))
    if release.demands != pairing.demands:
        release = dataclasses.replace(release, demands=pairing.demands)
        if release.state in ("inspected", "passed", "failed"):
            say(f"{pairing.tag}: its smoke test asks for something else now; it must be smoked anew")
            release = dataclasses.replace(release, state="built", smoke=None)
    inputs = KeptInputs.of(paths)
    if not inputs.has_all(release.inputs.values()):
        release = dataclasses.replace(release, inputs=pairing.inputs, executable=pairing.executable)
        inputs.keep_project(paths.project, release.inputs)
    if release != known:
        records.save(release)
        adopt(paths, release)
    engine.tag(built.ref, release.tag)
    engine.tag(built.ref, stage_tag(release.recipe, release.stage))
    return release


def new_release(pairing: Pairing, built: builder.BuiltImage, host: Fingerprint | None = None) -> Release:
    return Release(
        tag=pairing.tag,
        recipe=pairing.recipe.name,
        stage=pairing.stage.name,
        stack=pairing.stack.name,
        model=pairing.model.name,
        drafter=pairing.model.drafter.name if pairing.model.drafter else None,
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
        demands=pairing.demands,
        inputs=pairing.inputs,
        executable=pairing.executable,
        host=host,
    )


def checkpoint_of(paths: Paths, release: Release) -> Path:
    """The checkpoint folder of a release; made from the release's own pins when it is not there.

    A checkpoint that a bundle brought serves releases that bundles brought, and no other.
    """
    if folder := ready_checkpoint(paths, release):
        return folder
    with project_of(paths, release) as project:
        for pairing in pair(project, release.recipe, stage=release.stage):
            if pairing.checkpoint_key == release.checkpoint_key:
                return build_checkpoint(paths, pairing.model, pairing.model_lock, pairing.steps, say)
    folder = Releases(paths).checkpoint(release)
    raise CheckpointError(
        f"the checkpoint of {release.tag} ({folder}) is gone or damaged, and this sparkpin makes another of its pins",
        next_step=f"use the sparkpin that made it, or `invoke build --recipe {release.recipe} --stage {release.stage}`",
    )


def make_again(paths: Paths, release: Release) -> None:
    """Make what is missing of a release's images and checkpoint again, from its record, and tag it."""
    with at_work(paths) as engine:
        chain = records_of(paths, release)
        check_form(chain)
        images = [cross_build.again(paths, built, engine.platform) for built in chain]
        for line in filter(None, map(cross_build.moved, chain, images)):
            say(f"note: {line}")
        require_inputs(paths, release, images, say)
        for built, image in zip(chain, images, strict=True):
            builder.build_image(paths, engine, image, say, wanted=built.config_digest)
        engine.tag(chain[-1].ref, release.tag)
        checkpoint_of(paths, release)


def smoke_releases(
    paths: Paths,
    wanted: tuple[Release, ...],
    *,
    load: bool = False,
    done: int = 0,
    total: int = 0,
    over: Mapping[str, Joined] | None = None,
) -> tuple[Release, ...]:
    """A server for each that can run here, one after the other; the others are inspected. load: and their libraries
    loaded, too. done, total: where these are a part of more, to number them. over: by tag, the machines of those that
    are not for this one alone."""
    from sparkpin.smoke.inspected import run_inspection
    from sparkpin.smoke.run import run_smoke  # slow to import, as all that asks a server

    engine = engine_of(paths)
    found = []
    for number, release in enumerate(wanted, start=done + 1):
        say(f"smoke test {number} of {total or len(wanted)}: {release.tag}")
        require_consistent(paths, release)
        joined = (over or {}).get(release.tag)
        if why := obstacle(paths, engine, release, nodes=1 if joined else None):
            if release.smoke_passed:
                raise InputError(
                    f"{release.tag} has passed its smoke test, and here it can only be inspected: {why}",
                    next_step=f"invoke smoke {release.tag} --inspect, which changes no record",
                )
            found.append(kept(paths, release, *run_inspection(paths, engine, release, why, say, load=load)))
        else:
            gpus = uses_gpu(paths, release)
            checkpoint = checkpoint_of(paths, release)
            if gpus and not joined:  # else vLLM refuses to start next to a server, and the release would be at fault
                with alone(paths, engine, say):
                    memory_limit.make_room(paths, engine, release, checkpoint, say)
            with joined(checkpoint) if joined else contextlib.nullcontext(()) as places:
                result, write = run_smoke(paths, engine, release, checkpoint, say, gpus=gpus, places=places)
            found.append(kept(paths, release, result, write))
    return tuple(found)


@contextlib.contextmanager
def smoke_of_served(paths: Paths) -> Iterator[Test]:
    """The smoke test of a server that is about to be served. No other one runs meanwhile, from before its start."""
    with alone(paths, engine_of(paths), say):
        yield partial(smoke_served, paths)


def smoke_served(paths: Paths, container: Container, order: LaunchOrder) -> None:
    """SmokeError where it fails; of a server that somebody stopped meanwhile nothing is kept."""
    from sparkpin.smoke import run

    release, found = order.release, None
    try:
        with reached(container) as port:
            found = run.smoke_served(paths, engine_of(paths), release, container, port, order.timeout, say)
    except EngineError:
        if not was_stopped(container):
            raise
    if found is None or was_stopped(container):
        raise SmokeError(f"{release.tag} was stopped while it was tested", next_step=f"invoke smoke {release.tag}")
    result, write = found
    if not kept(paths, release, result, write).smoke_passed:
        raise SmokeError(
            f"{release.tag} failed its smoke test and is not served",
            next_step=f"read {result.log_path}, then invoke smoke {release.tag}",
        )
