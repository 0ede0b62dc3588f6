"""Making a release's images again from its record: in an engine of their own, to compare them with it, or to stay.

The former shares nothing with the first build but the inputs, each of which is verified as it is used: a second dockerd
with an empty data root in a network namespace without interfaces, empty caches, the root file system made again.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from sparkpin.build.consistent import same
from sparkpin.build.context import UV, uv_file
from sparkpin.build.image import build_image
from sparkpin.build.make import at_work, checkpoint_of
from sparkpin.build.pair import pair
from sparkpin.build.record import BuildRecord, RenderedImage, layer_file, read_record, record_file, records_of
from sparkpin.build.render import BUILDER
from sparkpin.core import files
from sparkpin.core.errors import HostError, IntegrityError
from sparkpin.core.paths import Paths
from sparkpin.core.progress import waiting
from sparkpin.core.tags import image_ref, rootfs_ref
from sparkpin.core.terminal import printable, say
from sparkpin.fetch import stack as fetch
from sparkpin.host.engine import Engine
from sparkpin.host.machine import this_platform
from sparkpin.host.private_engine import private_engine
from sparkpin.image import seal
from sparkpin.image.listing import compare_images, read_contents
from sparkpin.pins.schema import LockedFile
from sparkpin.releases.kept_inputs import KeptInputs, project_of
from sparkpin.releases.record import Release

PREFIX = "reproduce-"  # of a run's folder below work/, and of that of its engine's sockets


Verdict = Literal["identical", "different"]


@dataclass(frozen=True)
class StageResult:
    """How one image came out. got: its config digest; lines: what differs, for people."""

    stage: str
    verdict: Verdict
    got: str
    layers: int
    seconds: float
    lines: tuple[str, ...]


def reproduce(paths: Paths, release: Release) -> tuple[StageResult, ...]:
    """Build every image of the release's chain again and compare it with the record.

    Network only where a locked input is no longer in the store. Raises HostError without root or dockerd.
    """
    if os.geteuid() != 0:  # before anything is fetched
        step = f"sudo -E .venv/bin/invoke reproduce {release.tag}"
        raise HostError("only root may start the second Docker engine that this needs", next_step=step)
    results, builds = list[StageResult](), recorded_builds(paths, release, this_platform())
    with engine_apart(paths) as (apart, engine):
        for before, image in builds:
            build_image(apart, engine, image)
            after = read_record(record_file(apart, image))
            same_bytes = (after.config_digest, after.diff_ids) == (before.config_digest, before.diff_ids)
            lines = () if same_bytes else tuple(map(printable, differences((paths, before), (apart, after))))
            verdict: Verdict = "identical" if same_bytes else "different"
            got, layers = after.config_digest, len(after.diff_ids)
            results.append(StageResult(after.stage, verdict, got, layers, after.seconds, lines))
    return tuple(results)


def restore(paths: Paths, release: Release) -> None:
    """Make what is missing of a release's images and checkpoint again, from its record, and tag it: to stay."""
    with at_work(paths) as engine:
        builds = recorded_builds(paths, release, engine.platform)
        for record, image in builds:
            build_image(paths, engine, image, expected=record.config_digest)
        engine.tag(builds[-1][1].ref, release.tag)
        checkpoint_of(paths, release)


def recorded_builds(paths: Paths, release: Release, machine: str) -> list[tuple[BuildRecord, RenderedImage]]:
    """The records of a release, and the builds that can run on a machine (its platform).

    Fetches what the stores lack of the release's own lock; what nobody offers is an error of `fetch`.
    """
    records = records_of(paths, release)
    check_form(records)
    images = [again(record, machine) for record in records]
    if absent_inputs(paths, images):
        with project_of(paths, release) as project:
            last = pair(project, release.recipe, stage=release.stage)[-1]
            fetch.fetch_stack(paths, last.stack, last.stack_lock)
    if lost := absent_inputs(paths, images):
        cause = f"{len(lost)} inputs of {release.tag} are gone from {paths.inputs}, the first: {lost[0].name}"
        step = "import a bundle of the release (`invoke import FILE`)"
        raise IntegrityError(f"{cause} (sha256={lost[0].sha256})", next_step=step)
    return list(zip(records, images, strict=True))


def again(record: BuildRecord, machine: str) -> RenderedImage:
    """A recorded build as it can run on a machine (its platform): where its steps ran then, if that is such a machine.

    Elsewhere this machine's uv runs them; whether another version of it gives the same bytes, a comparison shows.
    """
    image, ran_on = record.rendered, (record.builder or record).platform
    if machine == ran_on or f"ARG {BUILDER}=" not in image.dockerfile:
        return image
    return replace(image, context=tuple(uv_file() if file.path == UV else file for file in image.context))


def check_form(records: Sequence[BuildRecord]) -> None:
    """IntegrityError for an image in another canonical form than this sparkpin writes, or under another name.

    records: first stage first. What a record names is tagged, so the names must be those that its keys give.
    """
    below = ""
    for record in records:
        ref = image_ref(record.stack, record.stage, record.key)
        below = rootfs_ref(record.rootfs.suite, record.rootfs.key) if record.rootfs else below
        got = (record.seal, record.epoch, record.ref, record.parent_ref)
        same(f"{record.stage}: form, epoch, name and parent", got, (seal.VERSION, files.EPOCH, ref, below))
        below = ref


def absent_inputs(paths: Paths, images: Sequence[RenderedImage]) -> list[LockedFile]:
    """Of all that they are made from, and in, what no store has."""
    inputs = KeptInputs.of(paths)
    files = [file.source for image in images for file in image.context if isinstance(file.source, LockedFile)]
    files += [deb for image in images if image.rootfs for deb in image.rootfs.debs]
    return [file for file in files if not inputs.holding(file).has(file)]


@contextlib.contextmanager
def engine_apart(paths: Paths) -> Iterator[tuple[Paths, Engine]]:
    """One run at a time, so all folders that are there when it begins are of killed ones, whose engines ended with
    them."""
    with files.lock(paths.locks / "reproduce.lock", on_wait="waiting for another reproduce"):
        for left in paths.work.glob(f"{PREFIX}*"):
            say(f"removing what a killed reproduce left: {left}")
            remove_run(left)
        sockets = Path(tempfile.mkdtemp(prefix=PREFIX, dir="/tmp"))  # short: a socket's path has at most 107 bytes
        folder = paths.work / sockets.name
        try:
            apart = Paths(paths.project, folder / "cache", folder / "home")
            with files.disk_errors(paths.work):
                for link, target in ((apart.store, paths.store), (apart.inputs, paths.inputs)):
                    link.parent.mkdir(parents=True)
                    target.mkdir(parents=True, exist_ok=True)
                    link.symlink_to(target)
            with private_engine(sockets, folder / "engine-data") as engine:
                yield apart, engine
        finally:
            remove_run(folder)


def remove_run(folder: Path) -> None:
    """With the folder of its sockets; in /tmp anybody may have made that name again, and no link is followed."""
    with waiting(f"removing {folder}"):
        for path in (Path("/tmp", folder.name), folder):
            shutil.rmtree(path, ignore_errors=True)


def differences(before: tuple[Paths, BuildRecord], after: tuple[Paths, BuildRecord]) -> Iterator[str]:
    """Each setting and each field of a path that differs, with both values."""
    old, new = (json.dumps(json.loads(record.config), indent=1, sort_keys=True) for _, record in (before, after))
    for row in difflib.unified_diff(old.split("\n"), new.split("\n"), n=0, lineterm=""):
        if row[:3] not in ("---", "+++", "@@ "):
            yield f"configuration: {row}"
    listings = [[layer_file(paths, diff_id) for diff_id in record.diff_ids] for paths, record in (before, after)]
    if lost := [path for path in listings[0] if not path.is_file()]:
        yield f"files are not compared: the listing {lost[0]} is gone; invoke reproduce --keep brings it back"
        return
    found = compare_images(*([read_contents(path) for path in side] for side in listings))
    yield from (f"only in the recorded image: /{entry.path}" for entry in found.removed)
    yield from (f"only in the image built now: /{entry.path}" for entry in found.added)
    yield from (f"/{change.path}: {change.field} {change.before} -> {change.after}" for change in found.changed)
