"""The parts joined: pairings become images, and images releases, which get their checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sparkpin.build.consistent import IMPORTS, is_brought, ready_checkpoint
from sparkpin.build.context import require_own_uv
from sparkpin.build.image import build_image, find_built
from sparkpin.build.pair import Pairing, pair
from sparkpin.build.record import RenderedImage, read_record, record_file
from sparkpin.build.rootfs import native_stack
from sparkpin.core import locks
from sparkpin.core.errors import CheckpointError
from sparkpin.core.paths import Paths
from sparkpin.core.tags import stage_tag
from sparkpin.core.terminal import say
from sparkpin.host.engine import Engine, engine_of
from sparkpin.host.fingerprint import Fingerprint, read_fingerprint
from sparkpin.host.images import ImageInfo
from sparkpin.pins.schema import Stack, StackLock
from sparkpin.releases.kept_inputs import KeptInputs, project_of
from sparkpin.releases.record import Release, Releases, now


@contextlib.contextmanager
def at_work(paths: Paths) -> Iterator[Engine]:
    """The engine, while `prune` is kept from taking what is fetched and made for a release."""
    with locks.claim(paths):
        yield engine_of(paths)


def fetch_missing(paths: Paths, engine: Engine, pairings: Sequence[Pairing], *, offline: bool = False) -> None:
    """What the images of a chain still need of their stack's lock; nothing for images that are there.

    offline: what is missing is an error.
    """
    for pairing in pairings:
        fetch_for(paths, engine, pairing.rendered, pairing.stack, pairing.stack_lock, offline=offline)


def fetch_for(
    paths: Paths, engine: Engine, image: RenderedImage, stack: Stack, stack_lock: StackLock, *, offline: bool = False
) -> None:
    """As `fetch_missing`, for one image; and what stands in for the stack where the engine's machine is another."""
    if image.parent_key is not None or find_built(paths, engine, image):
        return  # what stands on an image of ours needs nothing else
    from sparkpin.fetch import stack as fetching  # slow to import, and a build that finds all there fetches nothing

    require_own_uv(image, engine.platform)  # before gigabytes are fetched for nothing
    far = (machine := engine.platform) != stack.platform
    for one, lock in ((stack, stack_lock), *([native_stack(paths, stack, machine)] if far else [])):
        if offline:
            fetching.require_fetched(paths, lock)
        else:
            fetching.fetch_stack(paths, one, lock)


def build_images(paths: Paths, engine: Engine, pairings: Sequence[Pairing]) -> tuple[ImageInfo, ...]:
    return tuple(build_image(paths, engine, pairing.rendered) for pairing in pairings)


def build_releases(paths: Paths, engine: Engine, pairings: Sequence[Pairing]) -> Iterator[Release]:
    """Build what is not built; each release comes, recorded, as soon as its image is there."""
    for pairing in pairings:
        yield record_release(paths, engine, pairing, build_image(paths, engine, pairing.rendered))


def record_release(paths: Paths, engine: Engine, pairing: Pairing, image: ImageInfo) -> Release:
    """The release of a pairing: the one that is there when it has these bytes, else a new one, tagged."""
    records, tag = Releases(paths), pairing.tag
    release = known = records.find(tag)
    if known and (known.image != image.config_digest or is_brought(paths, known)):
        say(f"{tag}: was built here again: it had other bytes, or came from a bundle; smoke it again")
        release = None
    if release is None:
        seconds = read_record(record_file(paths, pairing.rendered)).seconds
        release = new_release(pairing, image, seconds, read_fingerprint(engine.version))
    if release.demands != pairing.demands:
        release = dataclasses.replace(release, demands=pairing.demands)
        if release.state in ("inspected", "passed", "failed"):
            say(f"{tag}: its smoke test has changed since; smoke it again")
            release = dataclasses.replace(release, state="built", smoke=None)
    inputs = KeptInputs.of(paths)
    if not inputs.has_all(release.inputs.values()):
        release = dataclasses.replace(release, inputs=pairing.inputs, executable=pairing.executable)
        inputs.keep_project(paths.project, release.inputs)
    if release != known:
        records.save(release)
        (records.evidence(release) / IMPORTS).unlink(missing_ok=True)  # whatever bundle brought it before
    for missing in {tag, stage_tag(release.recipe, release.stage)} - {*image.tags}:
        engine.tag(pairing.rendered.ref, missing)
    return release


def new_release(pairing: Pairing, image: ImageInfo, seconds: float, host: Fingerprint | None = None) -> Release:
    """seconds: what the build of the image took."""
    of_pairing = ("tag", "key", "checkpoint_key", "argv", "env", "demands", "inputs", "executable")
    fields: dict[str, Any] = {name: getattr(pairing, name) for name in of_pairing}
    return Release(
        **fields,
        recipe=pairing.recipe.name,
        stage=pairing.stage.name,
        stack=pairing.stack.name,
        model=pairing.model.name,
        drafter=pairing.model.drafter.name if pairing.model.drafter else None,
        build_key=pairing.rendered.key,
        image=image.config_digest,
        diff_ids=image.diff_ids,
        size=image.size,
        created=now(),
        build_seconds=seconds,
        host=host,
    )


def checkpoint_of(paths: Paths, release: Release) -> Path:
    """The checkpoint folder of a release; made from the release's own pins when it is not there."""
    if folder := ready_checkpoint(paths, release):
        return folder
    from sparkpin.build.checkpoint import build_checkpoint  # slow to import, with all that fetches

    with project_of(paths, release) as project:
        for pairing in pair(project, release.recipe, stage=release.stage):
            if pairing.checkpoint_key == release.checkpoint_key:
                return build_checkpoint(paths, pairing.model, pairing.model_lock, pairing.steps)
    lost = f"the checkpoint of {release.tag} ({Releases(paths).checkpoint(release)}) is gone or damaged"
    step = f"use the sparkpin that made it, or `invoke build --recipe {release.recipe} --stage {release.stage}`"
    raise CheckpointError(f"{lost}, and this version of sparkpin makes another one from the same pins", next_step=step)
