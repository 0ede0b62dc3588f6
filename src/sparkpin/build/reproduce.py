"""Making a release's images again from its record: in an engine of their own, saying what came out, or to stay.

Of the former, nothing is shared with the first build but the inputs, each of which is verified as it is used: a second
dockerd with an empty data root in a network namespace without interfaces, empty caches, the root file system made
again.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from sparkpin.build import cross_build
from sparkpin.build import image as build
from sparkpin.build.make import at_work, checkpoint_of
from sparkpin.build.pair import pair
from sparkpin.build.record import (
    BuildRecord,
    RenderedImage,
    check_form,
    layer_file,
    read_record,
    record_file,
    records_of,
)
from sparkpin.core import files
from sparkpin.core.errors import BusyError, HostError, IntegrityError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.core.progress import waiting
from sparkpin.core.terminal import Say, printable, say
from sparkpin.fetch import stack as fetch
from sparkpin.host import image_files
from sparkpin.host.daemon import Daemon, start_engine, stop_engine
from sparkpin.host.engine import Engine
from sparkpin.host.machine import this_platform
from sparkpin.image.listing import Contents, read_contents
from sparkpin.image.listing_diff import FieldChange, compare_images
from sparkpin.pins.mods import Mod
from sparkpin.pins.schema import LockedFile
from sparkpin.releases.kept_inputs import KeptInputs, project_of
from sparkpin.releases.record import Release, now

Verdict = Literal["identical", "equivalent", "different"]
ORDER: list[Verdict] = ["identical", "equivalent", "different"]
PREFIX, ALIVE, SOCKETS, DATA = "reproduce-", "alive", "sockets", "engine-data"  # of a run's folder below work/
SMALL = 64 << 10  # bytes; longer files are compared by their hashes
SHOWN = 20  # files whose text is compared
LINES = 40  # of one file's comparison


@dataclass(frozen=True)
class StageResult:
    """How one image came out. expected, got: config digests; lines: what differs, for people."""

    stage: str
    verdict: Verdict
    expected: str
    got: str
    layers: int
    seconds: float
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reproduction:
    """stages: first stage first; engine: the version that built them; notes: what else a person should know."""

    release: str
    engine: str
    stages: tuple[StageResult, ...]
    notes: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        """That of the stage that came out worst."""
        return max((stage.verdict for stage in self.stages), key=ORDER.index)


def to_json(result: Reproduction) -> dict[str, Any]:
    return {"verdict": result.verdict, "at": now(), **asdict(result)}


def reproduce(paths: Paths, release: Release, original: Engine | None, say: Say) -> Reproduction:
    """Build every image of the release's chain again and compare it with the record.

    original: the engine that holds the release's images, from which differing texts are read. Network only where a
    locked input is no longer in the store. Raises HostError without root or dockerd.
    """
    records = records_of(paths, release)
    check_form(records)
    if lost := [diff_id for diff_id in records[-1].diff_ids if not layer_file(paths, diff_id).is_file()]:
        raise IntegrityError(
            f"{release.tag}: the listing of layer {lost[0]}, which a comparison reads, is gone from {paths.layers}",
            next_step=f"invoke reproduce {release.tag} --keep",
        )
    images, notes = images_again(paths, release, records, this_platform(), say)
    notes = (rendered_again(paths, release, records), *notes)
    results: list[StageResult] = []
    with engine_apart(paths, say) as (apart, engine):
        for record, image in zip(records, images, strict=True):
            built = build.build_image(apart, engine, image, say)
            again = read_record(record_file(apart, image))
            verdict, lines = compare(RecordedImage(paths, original, record), RecordedImage(apart, engine, again))
            digests, count = (record.config_digest, built.config_digest), len(record.diff_ids)
            results.append(StageResult(record.stage, verdict, *digests, count, built.seconds, lines))
        return Reproduction(release.tag, engine.version, tuple(results), notes)


def restore(paths: Paths, release: Release) -> None:
    """Make what is missing of a release's images and checkpoint again, from its record, and tag it: to stay."""
    with at_work(paths) as engine:
        records = records_of(paths, release)
        check_form(records)
        images, notes = images_again(paths, release, records, engine.platform, say)
        for line in notes:
            say(f"note: {line}")
        for record, image in zip(records, images, strict=True):
            build.build_image(paths, engine, image, say, expected=record.config_digest)
        engine.tag(records[-1].ref, release.tag)
        checkpoint_of(paths, release)


def images_again(
    paths: Paths, release: Release, records: Sequence[BuildRecord], machine: str, say: Say
) -> tuple[list[RenderedImage], tuple[str, ...]]:
    """The recorded builds as they can run on a machine (its platform), and what is other than it was, in words.

    Fetches what the stores lack of the release's own lock; what nobody offers is an error of `fetch`.
    """
    images = [cross_build.again(paths, record, machine) for record in records]
    if absent_inputs(paths, images):
        with project_of(paths, release) as project:
            last = pair(project, release.recipe, stage=release.stage)[-1]
            fetch.fetch_stack(paths, last.stack, last.stack_lock, say)
            for spec in {image.builder.key: image.builder for image in images if image.builder}.values():
                fetch.fetch_stack(paths, *cross_build.fetched_with(spec, last.stack, last.stack_lock), say)
    if lost := absent_inputs(paths, images):
        raise IntegrityError(
            f"{len(lost)} inputs of {release.tag} are gone from {paths.inputs}, the first: {lost[0].name} "
            f"(sha256={lost[0].sha256})",
            next_step="import a bundle of the release (`invoke import FILE`)",
        )
    return images, tuple(filter(None, map(cross_build.moved, records, images)))


def absent_inputs(paths: Paths, images: Sequence[RenderedImage]) -> list[LockedFile]:
    """Of all that they are made from, and in, what no store has."""
    inputs = KeptInputs.of(paths)
    files = [file.source for image in images for file in image.context if isinstance(file.source, LockedFile)]
    files += [deb for image in images for spec in (image.rootfs, image.builder) if spec for deb in spec.debs]
    return [file for file in files if not inputs.holding(file).has(file)]


def rendered_again(paths: Paths, release: Release, records: Sequence[BuildRecord]) -> str:
    """Whether the recorded pins, locks and mods, read by this sparkpin, still ask for these very builds."""
    try:
        with project_of(paths, release) as project:
            today = [pairing.rendered for pairing in pair(project, release.recipe, stage=release.stage)]
    except SparkpinError as error:  # the records are enough to build; only this comparison needs the manifests
        return f"this sparkpin cannot read the recorded pins ({error.message}); the images were made as recorded"
    if [image.key for image in today] == [record.key for record in records]:
        return "the recorded pins, locks and mods give the same build keys today"
    before = {one for record in records for row in record.context for one in (row.sha256, row.what)}
    files = [file for image in today for file in image.context if not isinstance(file.source, Mod)]
    newer = sorted({file.what for file in files if (file.identity or file.sha256) not in before})
    why = ", ".join(newer) or "its Dockerfiles or its tools are rendered otherwise"
    return f"this sparkpin would build these pins otherwise ({why}); the images were made as recorded"


@contextlib.contextmanager
def engine_apart(paths: Paths, say: Say) -> Iterator[tuple[Paths, Engine]]:
    """A second engine, and state folders that know nothing but the inputs; removed afterwards.

    Its images lie on the cache's disk, its sockets where paths are short. What killed runs left goes first.
    """
    if os.geteuid() != 0:
        raise HostError(
            "only root may start the second Docker engine that a rebuild from scratch needs",
            next_step="sudo -E .venv/bin/invoke reproduce ..., with the same options",
        )
    clear_leftovers(paths, say)
    with files.disk_errors(paths.work):
        paths.work.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=paths.work))
    with files.lock(folder / ALIVE):
        try:
            apart = Paths(paths.project, folder / "cache", folder / "home")
            for link, target in ((apart.store, paths.store), (apart.inputs, paths.inputs)):
                link.parent.mkdir(parents=True)
                target.mkdir(parents=True, exist_ok=True)
                link.symlink_to(target)
            (folder / SOCKETS).write_text(tempfile.mkdtemp(prefix="sp-", dir="/tmp"))
            daemon = daemon_of(folder)
            start_engine(apart, say, daemon)
            yield apart, Engine.at(f"unix://{daemon.socket}")
        finally:
            try:
                remove_run(folder, say)
            except HostError as error:  # it must not hide why the run ended; the next run finds all of it
                say(f"warning: {folder} stays: {error}")


def clear_leftovers(paths: Paths, say: Say) -> None:
    """What a killed run left: its engine, which may still run, and its folders. A run that lives is left alone."""
    for folder in sorted(paths.work.glob(f"{PREFIX}*")):
        with contextlib.suppress(BusyError), files.lock(folder / ALIVE, wait=False):
            say(f"removing what a killed rebuild left: {folder}")
            remove_run(folder, say)


def daemon_of(folder: Path) -> Daemon:
    return Daemon.private(Path((folder / SOCKETS).read_text()), folder / "cache" / DATA)


def remove_run(folder: Path, say: Say) -> None:
    """Its engine, then its folders. HostError, and nothing is removed, where the engine does not stop: its pid file is
    what finds it later."""
    if (folder / SOCKETS).is_file() and (sockets := Path((folder / SOCKETS).read_text())).is_dir():
        stop_engine(daemon_of(folder), say)
        shutil.rmtree(sockets, ignore_errors=True)
    with waiting(say, f"removing {folder}"):
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class RecordedImage:
    """An image's record, the folders with its listings, and the engine that may have it."""

    paths: Paths
    engine: Engine | None
    record: BuildRecord

    @property
    def layers(self) -> list[Contents]:
        return [read_contents(layer_file(self.paths, diff_id)) for diff_id in self.record.diff_ids]

    def texts(self, paths: Sequence[str]) -> dict[str, list[str]]:
        """The lines of the small files among them that are text; none where the engine does not have the image."""
        image = self.engine.image(self.record.ref) if self.engine and paths else None
        found: dict[str, list[str]] = {}
        if self.engine and image and image.config_digest == self.record.config_digest:
            for path, data in image_files.read_files(self.engine, self.record.ref, paths, limit=SMALL).items():
                with contextlib.suppress(UnicodeDecodeError):
                    found[path] = data.decode().splitlines()
        return found


def compare(before: RecordedImage, after: RecordedImage) -> tuple[Verdict, tuple[str, ...]]:
    """By digests when they agree, else by configuration, listings and texts: the verdict, and what differs."""
    old, new = before.record, after.record
    if (new.config_digest, new.diff_ids) == (old.config_digest, old.diff_ids):
        return "identical", ()
    lines = list(config_lines(json.loads(old.config), json.loads(new.config)))
    difference = compare_images(before.layers, after.layers)
    lines += [f"/{c.path}: {c.field} {c.before} -> {c.after}" for c in difference.changed if c.field != "content"]
    if difference.only_metadata:
        if not lines:
            pairs = zip_longest(old.diff_ids, new.diff_ids, fillvalue="(none)")
            lines = ["the same files in other layers", *(f"layer {a} -> {b}" for a, b in pairs if a != b)]
        return "equivalent", tuple(map(printable, lines))
    lines += [f"only in the recorded image: /{entry.path}" for entry in difference.removed]
    lines += [f"only in the image built now: /{entry.path}" for entry in difference.added]
    lines += content_lines([change for change in difference.changed if change.field == "content"], before, after)
    return "different", tuple(map(printable, lines))


def config_lines(before: Mapping[str, Any], after: Mapping[str, Any], key: str = "config") -> Iterator[str]:
    """The fields of the configuration that differ, but for the layers' digests and their history, which follow."""
    for name in sorted({*before, *after}):
        if name in ("rootfs", "history") and key == "config":
            continue
        one, two = before.get(name), after.get(name)
        if isinstance(one, dict) and isinstance(two, dict):
            yield from config_lines(one, two, f"{key}.{name}")
        elif one != two:
            yield f"{key}.{name}: {json.dumps(one)} -> {json.dumps(two)}"


def content_lines(changed: Sequence[FieldChange], before: RecordedImage, after: RecordedImage) -> Iterator[str]:
    """The files with other content; of small texts the differing lines, as long as both images can be read."""
    paths = [change.path for change in changed[:SHOWN]]
    old, new = before.texts(paths), after.texts(paths)
    for place, change in enumerate(changed):
        missing = " (its text is not compared: too many files differ)" if place == SHOWN else ""
        yield f"/{change.path}: content {change.before[:12]} -> {change.after[:12]}{missing}"
        if change.path in old and change.path in new:
            texts = (old[change.path], new[change.path])
            rows = list(difflib.unified_diff(*texts, "recorded", "built now", n=1, lineterm=""))
            yield from (f"    {row}" for row in rows[:LINES])
            if len(rows) > LINES:
                yield f"    ... and {len(rows) - LINES} lines more"
