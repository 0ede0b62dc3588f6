"""Making a release's images again from its record, in an engine of their own, and saying what came out.

Nothing is shared with the first build but the inputs, each of which is verified as it is used: a second dockerd with an
empty data root in a network namespace without interfaces, empty caches, the root file system made anew.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from sparkpin.build import cross_build
from sparkpin.build import image as build
from sparkpin.build.pair import pair
from sparkpin.build.record import BuildRecord, check_form, layer_file, read_record, record_file, records_of
from sparkpin.build.render import RenderedImage
from sparkpin.core import files
from sparkpin.core.errors import BusyError, HostError, IntegrityError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.core.progress import waiting
from sparkpin.core.terminal import Say, printable
from sparkpin.fetch import stack as fetch
from sparkpin.host import image_files
from sparkpin.host.daemon import Daemon, start_engine, stop_engine
from sparkpin.host.engine import Engine
from sparkpin.host.machine import this_platform
from sparkpin.image.listing import Contents, read_contents
from sparkpin.image.listing_diff import ContentsDifference, compare_images
from sparkpin.pins.schema import LockedFile
from sparkpin.releases.kept_inputs import KeptInputs, project_of
from sparkpin.releases.record import Release, now

Verdict = Literal["identical", "equivalent", "different"]
PREFIX, ALIVE, SOCKETS, DATA = "reproduce-", "alive", "sockets", "engine-data"  # of a run's folder below work/
SMALL = 64 << 10  # bytes; longer files are told by their hashes
SHOWN = 20  # files whose text is compared
LINES = 40  # of one file's comparison


@dataclass(frozen=True)
class StageResult:
    """How one image came out. wanted, got: config digests; lines: what differs, for people."""

    stage: str
    verdict: Verdict
    wanted: str
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
        order: list[Verdict] = ["identical", "equivalent", "different"]
        return max((stage.verdict for stage in self.stages), key=order.index)


def to_json(result: Reproduction) -> dict[str, Any]:
    return {"verdict": result.verdict, "at": now(), **asdict(result)}


def reproduce(paths: Paths, release: Release, original: Engine | None, say: Say) -> Reproduction:
    """Build every image of the release's chain again and compare it with the record.

    original: the engine that holds the release's images, from which differing texts are read. Network only where a
    locked input is no longer in the store. Raises HostError without root or dockerd.
    """
    records = records_of(paths, release)
    check_form(records)
    require_listings(paths, release, records)
    images = [cross_build.again(paths, record, this_platform()) for record in records]
    require_inputs(paths, release, images, say)
    notes = (*rendered_again(paths, release, records), *filter(None, map(cross_build.moved, records, images)))
    results: list[StageResult] = []
    clear_leftovers(paths, say)
    with scratch(paths, say) as own, private_engine(paths, own, say) as (engine, version):
        for record, image in zip(records, images, strict=True):
            built = build.build_image(own, engine, image, say)
            results.append(compare(paths, own, record, built, original, engine))
    return Reproduction(release.tag, version, tuple(results), notes)


def require_listings(paths: Paths, release: Release, records: Sequence[BuildRecord]) -> None:
    """What the comparison needs when bytes differ; told before anything is built."""
    lost = [diff_id for diff_id in records[-1].diff_ids if not layer_file(paths, diff_id).is_file()]
    if lost:
        raise IntegrityError(
            f"{release.tag}: the listing of layer {lost[0]} is gone from {paths.layers}",
            next_step=f"invoke reproduce {release.tag} --keep",
        )


def require_inputs(paths: Paths, release: Release, images: Sequence[RenderedImage], say: Say) -> None:
    """Fetch what the stores lack of the release's own lock; what nobody offers is an error of `fetch`."""
    inputs = KeptInputs.of(paths)
    if not [file for file in inputs_of(images) if not inputs.holding(file).has(file)]:
        return
    with project_of(paths, release) as project:
        last = pair(project, release.recipe, stage=release.stage)[-1]
        fetch.fetch_stack(paths, last.stack, last.stack_lock, say)
        for spec in {image.builder.key: image.builder for image in images if image.builder}.values():
            fetch.fetch_stack(paths, *cross_build.fetched_with(spec, last.stack, last.stack_lock), say)
    if lost := [file for file in inputs_of(images) if not inputs.holding(file).has(file)]:
        raise IntegrityError(
            f"{len(lost)} inputs of {release.tag} are gone from {paths.inputs}, the first: {lost[0].name} "
            f"(sha256={lost[0].sha256})",
            next_step="import a bundle of the release (`invoke import FILE`)",
        )


def inputs_of(images: Sequence[RenderedImage]) -> list[LockedFile]:
    """Every file that they are made from, and in."""
    found: list[LockedFile] = []
    for image in images:
        for spec in filter(None, (image.rootfs, image.builder)):
            found += spec.debs
        found += [file.locked for file in image.context if file.locked]
    return found


def rendered_again(paths: Paths, release: Release, records: Sequence[BuildRecord]) -> tuple[str, ...]:
    """Whether the recorded pins, locks and mods, read by this sparkpin, still ask for these very builds."""
    try:
        with project_of(paths, release) as project:
            today = [pairing.rendered for pairing in pair(project, release.recipe, stage=release.stage)]
    except SparkpinError as error:  # the records are enough to build; only this comparison needs the manifests
        return (f"this sparkpin cannot read the recorded pins ({error.message}); the images were made as recorded",)
    if [image.key for image in today] == [record.key for record in records]:
        return ("the recorded pins, locks and mods give the same build keys today",)
    before = {file.path: (file.what, file.sha256) for record in records for file in record.rendered.context}
    after = {file.path: (file.what, file.sha256) for image in today for file in image.context if file.source != "mod"}
    changed = {
        f"{before[path][0]} -> {what}"
        for path, (what, sha256) in after.items()
        if before.get(path, ("", ""))[1] != sha256
    }
    why = ", ".join(sorted(changed)) or "its Dockerfiles or its tools are rendered otherwise"
    return (f"this sparkpin would build these pins otherwise ({why}); the images were made as recorded",)


@contextlib.contextmanager
def scratch(paths: Paths, say: Say = lambda line: None) -> Iterator[Paths]:
    """State folders that know nothing but the inputs, on the cache's disk; removed afterwards."""
    with files.disk_errors(paths.work):
        paths.work.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=paths.work))
    with files.lock(folder / ALIVE), contextlib.ExitStack() as stack:
        stack.callback(remove_told, folder, say)
        own = Paths(paths.project, folder / "cache", folder / "home")
        for link, target in ((own.store, paths.store), (own.inputs, paths.inputs)):
            link.parent.mkdir(parents=True)
            target.mkdir(parents=True, exist_ok=True)
            link.symlink_to(target)
        yield own


def remove_told(folder: Path, say: Say) -> None:
    with waiting(say, f"removing {folder}"):
        shutil.rmtree(folder, ignore_errors=True)


def clear_leftovers(paths: Paths, say: Say) -> None:
    """What a killed run left: its engine, which may still run, and its folders. A run that lives is left alone."""
    for folder in sorted(paths.work.glob(f"{PREFIX}*")):
        with contextlib.suppress(BusyError), files.lock(folder / ALIVE, wait=False):
            say(f"removing what a killed rebuild left: {folder}")
            if (note := folder / SOCKETS).is_file() and (sockets := Path(note.read_text())).is_dir():
                stop_engine(Daemon.private(sockets, folder / "cache" / DATA), say)
                shutil.rmtree(sockets, ignore_errors=True)
            remove_told(folder, say)


@contextlib.contextmanager
def private_engine(paths: Paths, own: Paths, say: Say) -> Iterator[tuple[Engine, str]]:
    """An engine of its own and its version. Its images lie on the cache's disk, its sockets where paths are short."""
    if os.geteuid() != 0:
        raise HostError(
            "only root may start the second Docker engine that a rebuild from scratch needs",
            next_step="sudo -E .venv/bin/invoke reproduce ..., with the same options",
        )
    sockets = Path(tempfile.mkdtemp(prefix="sp-", dir="/tmp"))
    (own.cache.parent / SOCKETS).write_text(str(sockets))
    daemon = Daemon.private(sockets, own.cache / DATA)
    try:
        version = start_engine(own, say, daemon)
        yield Engine.at(f"unix://{daemon.socket}"), version
    finally:
        with contextlib.suppress(HostError):
            stop_engine(daemon, say)
        say("removing its images and caches")
        shutil.rmtree(sockets, ignore_errors=True)


def compare(
    paths: Paths, own: Paths, record: BuildRecord, built: build.BuiltImage, original: Engine | None, engine: Engine
) -> StageResult:
    """One image against its record: by digests when they agree, else by configuration, listings and texts."""
    result = StageResult(
        stage=record.stage,
        verdict="identical",
        wanted=record.config_digest,
        got=built.config_digest,
        layers=len(record.diff_ids),
        seconds=built.seconds,
    )
    if (built.config_digest, list(built.diff_ids)) == (record.config_digest, record.diff_ids):
        return result
    made = read_record(record_file(own, record.rendered))
    lines = list(config_lines(json.loads(record.config), json.loads(made.config)))
    difference = compare_images(listed(paths, record), listed(own, made))
    lines += [f"/{c.path}: {c.field} {c.before} -> {c.after}" for c in difference.changed if c.field != "content"]
    if difference.only_metadata:
        if not lines:
            lines = layer_lines(record, made)
        return replace(result, verdict="equivalent", lines=tuple(map(printable, lines)))
    lines += [f"only in the recorded image: /{entry.path}" for entry in difference.removed]
    lines += [f"only in the image built now: /{entry.path}" for entry in difference.added]
    lines += content_lines(difference, record, original, engine)
    return replace(result, verdict="different", lines=tuple(map(printable, lines)))


def listed(paths: Paths, record: BuildRecord) -> list[Contents]:
    return [read_contents(layer_file(paths, diff_id)) for diff_id in record.diff_ids]


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


def layer_lines(record: BuildRecord, made: BuildRecord) -> list[str]:
    """For images with the same files in other layers."""
    before, after = record.diff_ids, made.diff_ids
    return [
        f"the same files in other layers: {len(before)} -> {len(after)}",
        *(f"layer {one or '(none)'} -> {two or '(none)'}" for one, two in zip_longest(before, after) if one != two),
    ]


def content_lines(
    difference: ContentsDifference, record: BuildRecord, original: Engine | None, engine: Engine
) -> Iterator[str]:
    """The files with other content; of small texts the differing lines, as long as both images can be read."""
    changed = [change for change in difference.changed if change.field == "content"]
    paths = [change.path for change in changed[:SHOWN]]
    before = texts(original, record.ref, record.config_digest, paths) if original else {}
    after = texts(engine, record.ref, None, paths)
    for place, change in enumerate(changed):
        untold = " (its text is not compared: too many files differ)" if place == SHOWN else ""
        yield f"/{change.path}: content {change.before[:12]} -> {change.after[:12]}{untold}"
        if change.path in before and change.path in after:
            one, two = before[change.path].splitlines(), after[change.path].splitlines()
            rows = list(difflib.unified_diff(one, two, "recorded", "built now", n=1, lineterm=""))
            yield from (f"    {row}" for row in rows[:LINES])
            if len(rows) > LINES:
                yield f"    ... and {len(rows) - LINES} lines more"


def texts(engine: Engine, ref: str, config_digest: str | None, paths: Sequence[str]) -> dict[str, str]:
    """The small files among them that are text; none where the engine does not have the image (of that digest)."""
    image = engine.image(ref) if paths else None
    if image is None or config_digest not in (None, image.config_digest):
        return {}
    found = image_files.read_files(engine, ref, paths, limit=SMALL)
    readable = {}
    for path, data in found.items():
        with contextlib.suppress(UnicodeDecodeError):
            readable[path] = data.decode()
    return readable
