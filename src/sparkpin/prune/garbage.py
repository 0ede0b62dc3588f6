"""Files of SPARKPIN_HOME and SPARKPIN_CACHE that no remaining release needs.

A prune waits for builds and imports (`core/locks`). What no record has ever named may still be of use: to one that was
killed and is repeated, to a checkpoint in the making, to a dry run, which does not wait. So it goes only when nothing
touched it for `STALE_AFTER`.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from sparkpin.build.record import BuildRecord, begun_mark, imported_mark, layer_file, read_record
from sparkpin.build.rootfs import rootfs_spec
from sparkpin.core import files
from sparkpin.core.errors import BusyError, IntegrityError, ManifestError
from sparkpin.core.paths import Paths
from sparkpin.core.tags import ROOTFS, repository_of
from sparkpin.fetch.model_files import blobs_of
from sparkpin.host.disk_usage import EngineImage
from sparkpin.pins.manifests import former_model_lock, load_stack, load_stack_lock
from sparkpin.pins.schema import ModelLock, StackLock
from sparkpin.prune.image_tags import STALE_AFTER
from sparkpin.releases.kept_inputs import KeptInputs
from sparkpin.releases.quality_record import KEY_DIGITS
from sparkpin.releases.record import Release, Releases
from sparkpin.upgrade.bisect import state as bisect

STORED = "[0-9a-f][0-9a-f]/[!.]*"  # of a store by SHA-256
WORK = ("context-*", "saved-*", "seal-*", "publish-*", "pull-*")
"""What a build works in, whose next run looks for its own key only, and layers for registries."""


@dataclass
class Referenced:
    """What releases refer to. records: file names of build records; unread: those of them that cannot be read.

    inputs: SHA-256 of files, in either store; layers: diff IDs; rootfs: keys.
    """

    folders: set[Path] = field(default_factory=set)
    records: set[str] = field(default_factory=set)
    unread: set[str] = field(default_factory=set)
    inputs: set[str] = field(default_factory=set)
    layers: set[str] = field(default_factory=set)
    rootfs: set[str] = field(default_factory=set)

    def add(self, record: BuildRecord) -> None:
        self.inputs |= {file.sha256 for file in record.context}
        self.layers |= set(record.diff_ids)
        for spec in record.root_file_systems:
            self.rootfs.add(spec.key)
            self.inputs |= {deb.sha256 for deb in spec.debs}


def project_needs(project: Path) -> Referenced:
    """What the locks of the project name. Raises ManifestError."""
    needs = Referenced()
    for path in sorted((project / "pins/stacks").glob("*.yaml")):
        if not path.with_suffix(".lock").is_file():
            continue  # not locked yet: nothing was fetched for it
        stack = load_stack(project, path.stem)
        lock = load_stack_lock(project, stack)
        needs.rootfs.add(rootfs_spec(stack, lock).key)
        needs.inputs |= {file.sha256 for file in lock.files}
    for path in sorted((project / "pins/models").glob("*.lock")):
        needs.inputs |= model_blobs(former_model_lock(project, path.stem))
    return needs


def model_blobs(lock: ModelLock) -> set[str]:
    """SHA-256 of the headers and tensors that a lock names, and of the wheel that its model is made from."""
    wheel = {lock.gguf.wheel.sha256} if lock.gguf else set()
    return wheel | {blob.sha256 for entry in lock.repositories.values() for blob in blobs_of(entry)}


@dataclass(frozen=True)
class GarbageSearch:
    """Looks, and changes nothing.

    images: those that the engine has when the files go; project: None where what it needs is not known; now: seconds
    since the epoch.
    """

    paths: Paths
    staying: Sequence[Release]
    removed: Sequence[Release]
    images: Sequence[EngineImage]
    project: Referenced | None
    now: float

    @cached_property
    def records(self) -> dict[str, BuildRecord | None]:
        """File name -> build record; None for one that cannot be read, such as one of an earlier version."""
        found: dict[str, BuildRecord | None] = {}
        for path in sorted(self.paths.images.glob("*.json")):
            try:
                found[path.name] = read_record(path)
            except IntegrityError:
                found[path.name] = None
        return found

    @cached_property
    def needed(self) -> Referenced:
        """What stays: for the releases, for images that the engine still has, and for builds that run now."""
        needs = self.needs_of(self.staying)
        tags = {tag for image in self.images for tag in image.tags}
        for name, record in self.records.items():
            if name not in needs.records | self.theirs.records:
                has_image = record is not None and record.ref in tags
                if has_image or not self.is_stale(self.paths.images / name):
                    needs.records.add(name)
                    if record is not None:
                        needs.add(record)
        return needs

    @cached_property
    def theirs(self) -> Referenced:
        """What the removed releases refer to: it goes however young it is, unless something needs it."""
        return self.needs_of(self.removed)

    def needs_of(self, releases: Iterable[Release]) -> Referenced:
        needs = Referenced()
        known = Releases(self.paths)
        for release in releases:
            needs.folders |= {known.checkpoint(release), known.evidence(release)}
            needs.inputs |= set(release.inputs.values())
            needs.layers |= set(release.diff_ids)
            for name in self.chain(release):
                needs.records.add(name)
                if record := self.records[name]:
                    needs.add(record)
                else:
                    needs.unread.add(name)
        return needs

    def chain(self, release: Release) -> Iterator[str]:
        """File names of the build records of a release's image and of all that it stands on."""
        key: str | None = release.build_key
        while key is not None:
            end, key = f"-{key[:12]}.json", None
            for name, record in self.records.items():
                if name.startswith(f"{release.stack}-") and name.endswith(end):
                    yield name
                    key = record.parent_key if record else None

    def is_stale(self, path: Path) -> bool:
        try:
            return self.now - last_touched(path) > STALE_AFTER
        except FileNotFoundError:  # a run that works there has just ended
            return False

    def files(self) -> dict[str, tuple[Path, ...]]:
        """By kind, in the order in which they are to go: what tells what is needed goes last."""
        paths, needed, theirs = self.paths, self.needed, self.theirs
        tags = {tag for image in self.images for tag in image.tags}
        known = Releases(paths)
        evidence = (known.evidence(release) for release in self.removed)
        layers, their_layers = ({layer_file(paths, one).name for one in some.layers} for some in (needed, theirs))
        # Notes spare the making of a layer that the engine has. Homes share them, as they share the engine.
        present = {diff_id for image in self.images for diff_id in image.diff_ids}
        loaded = {tag.rpartition("-")[2] for tag in tags if repository_of(tag) == ROOTFS}
        stacks = needed.rootfs | (self.project.rootfs if self.project else set())
        images = found(paths.cache / "rootfs") if self.project else []
        rootfs = [path for path in images if path.stem[:12] not in loaded]
        kept = self.unneeded(found(paths.inputs, STORED), needed.inputs, theirs.inputs)
        folders = filter(Path.is_dir, found(paths.checkpoints, "*/[!.]*"))
        # Homes may share the cache, so measurements of an unknown release go once they are old.
        measured, their_measured = ({one.key[:KEY_DIGITS] for one in some} for some in (self.staying, self.removed))
        return {
            "checkpoints": self.unneeded(folders, needed.folders, theirs.folders, lambda path: path),
            "evidence": tuple(filter(Path.is_dir, evidence)),
            "layer contents": () if needed.unread else self.unneeded(found(paths.layers), layers, their_layers),
            "layer notes": self.unneeded(found(paths.cache / "layers"), present, theirs.layers, noted_layer),
            "root file systems": self.unneeded(rootfs, stacks, theirs.rootfs, lambda path: path.stem),
            "kept inputs": () if needed.unread else kept,
            "quality measurements": self.unneeded(
                found(paths.cache / "quality"), measured, their_measured, lambda path: path.name[:KEY_DIGITS]
            ),
            "searches of bisect": tuple(self.searches()),
            "left by killed runs": tuple(self.left_over(tags)),
            "build records": tuple(self.build_records()),
        }

    def unneeded(
        self,
        places: Iterable[Path],
        needed: Collection[object],
        theirs: Collection[object],
        name: Callable[[Path], object] = lambda path: path.name,
    ) -> tuple[Path, ...]:
        """Those whose name nothing needs, and either the removed releases refer to it, or it is stale."""
        return tuple(p for p in places if name(p) not in needed and (name(p) in theirs or self.is_stale(p)))

    def store(self) -> tuple[Path, ...] | None:
        """Fetched files that neither a lock of the project nor a remaining release needs; None where not known."""
        if self.project is None or self.needed.unread:
            return None
        needed = self.needed.inputs | self.project.inputs | self.locked_by_releases()
        return self.unneeded(found(self.paths.store, STORED), needed, self.theirs.inputs)

    def searches(self) -> Iterator[Path]:
        """Those whose two releases stay can go on; a damaged one never can. What a search holds now stays."""
        staying, theirs = ({one.tag for one in found} for found in (self.staying, self.removed))
        for path in found(self.paths.home / bisect.FOLDER):
            try:
                known = bisect.read(path / bisect.FILE)
            except ManifestError:
                known = None
            tags = {known.good, known.bad} if known else set()
            if tags and tags <= staying:
                continue
            if (tags & theirs or self.is_stale(path)) and not is_held(path / bisect.LOCK):
                yield path

    def locked_by_releases(self) -> set[str]:
        """What the remaining releases' own locks name, of which their images may use less."""
        found: set[str] = set()
        inputs = KeptInputs.of(self.paths)
        wanted = {
            (sha256, name)
            for release in self.staying
            for name, sha256 in release.inputs.items()
            if name.startswith(("pins/stacks/", "pins/models/")) and name.endswith(".lock")
        }
        for sha256, name in sorted(wanted):
            if not inputs.has_all([sha256]):
                continue
            text = inputs.read(sha256, name)
            if name.startswith("pins/models/"):
                found |= model_blobs(ModelLock.model_validate_json(text))
            else:
                found |= {file.sha256 for file in StackLock.model_validate_json(text).files}
        return found

    def left_over(self, tags: Collection[str]) -> Iterator[Path]:
        """tags: that the engine has."""
        left = [path for root in (self.paths.home, self.paths.cache) for path in sorted(partials(root))]
        left += sorted(path for pattern in WORK for path in self.paths.work.glob(pattern))
        digits = {tag[-12:] for tag in tags}  # a mark says whose the image is, which goes before it
        marks = sorted(self.paths.images.glob(begun_mark(Path("*.json")).name))
        left += [mark for mark in marks if mark.name.partition(".json")[0][-12:] not in digits]
        yield from (path for path in dict.fromkeys(left) if self.is_stale(path))

    def build_records(self) -> Iterator[Path]:
        needed = self.needed.records
        for path in (self.paths.images / name for name in self.records if name not in needed):
            yield path
            if (mark := imported_mark(path)).is_file():  # after its record, which would pass for our own without it
                yield mark


def found(folder: Path, pattern: str = "[!.]*") -> list[Path]:
    """What lies there whole: half-written files and locks begin with a dot."""
    return sorted(folder.glob(pattern))


def is_held(lock: Path) -> bool:
    """Whether another run holds it. Without one nothing is made."""
    if not lock.is_file():
        return False
    try:
        with files.lock(lock, wait=False):
            return False
    except BusyError:
        return True


def noted_layer(path: Path) -> str | None:
    """The diff ID that a file of the cache's layers is about; None when it does not say."""
    if path.suffix != ".json":
        return f"sha256:{path.name.partition('.')[0]}"
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["diff_id"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def last_touched(path: Path) -> float:
    """Seconds since the epoch of the last change of a file or of anything in a folder; a new link to a file is one."""
    times = [path.lstat().st_ctime]
    for entry in path.rglob("*") if path.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):  # a run that works there is the newest of all
            times.append(entry.lstat().st_ctime)
    return max(times)


def partials(root: Path) -> Iterator[Path]:
    """What runs have begun and not finished, or been killed at."""
    for parent, folders, names in os.walk(root):
        found = [name for name in (*folders, *names) if name.startswith(files.PARTIAL)]
        yield from (Path(parent, name) for name in found)
        folders[:] = [name for name in folders if name not in found]
