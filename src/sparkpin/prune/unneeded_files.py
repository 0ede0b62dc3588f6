"""Files of SPARKPIN_HOME and SPARKPIN_CACHE that nothing needs any more: mark and sweep.

A mark is a name: a SHA-256, a diff ID, the first digits of a key. What stays (releases, images of the engine, locks of
the project) marks the names of all that it needs. A file whose name has no mark goes at once where a removed release
had marked it, else when nothing has touched it for `STALE_AFTER`. A prune waits for builds and imports (`core/locks`),
but not for the making of a checkpoint, and a dry run waits for nobody.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from sparkpin.build.record import BuildRecord, read_record
from sparkpin.build.rootfs import rootfs_spec
from sparkpin.core import files
from sparkpin.core.errors import BusyError, IntegrityError, ManifestError
from sparkpin.core.paths import Paths
from sparkpin.fetch.model_files import blobs_of
from sparkpin.host.images import ImageInfo
from sparkpin.pins.manifests import former_model_lock, load_stack, load_stack_lock
from sparkpin.pins.schema import ModelLock, StackLock
from sparkpin.prune.images import STALE_AFTER
from sparkpin.releases.kept_inputs import KeptInputs
from sparkpin.releases.quality_record import KEY_DIGITS
from sparkpin.releases.record import Release, Releases
from sparkpin.upgrade.bisect import state as bisect

WORK = ("context-*", "saved-*", "seal-*", "publish-*", "pull-*")
"""What a build works in, whose next run looks for its own key only, and layers for registries."""
STORE, ROOT_FILE_SYSTEMS = "store", "root file systems"


def hex_of(diff_id: str) -> str:
    return diff_id.removeprefix("sha256:")


def stem(path: Path) -> str:
    return path.name.partition(".")[0]


def noted_layer(path: Path) -> str:
    """The diff ID that a file of the cache's layers is about; "" when it does not say."""
    if path.suffix != ".json":
        return stem(path)
    try:
        return hex_of(json.loads(path.read_text(encoding="utf-8"))["diff_id"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""


def key_of_record(path: Path) -> str:
    """The first 12 digits of a build's key: of its record, and of the marks beside that."""
    return path.name.partition(".json")[0][-12:]


@dataclass(frozen=True)
class Place:
    """Where files of a kind lie. mark: of one of them."""

    folder: Path
    pattern: str
    mark: Callable[[Path], str] = stem


def places_of(paths: Paths) -> dict[str, Place]:
    """By kind, in the order in which they are to go: what tells what is needed goes last. What is half written, and
    locks, begin with a dot."""
    return {
        "checkpoints": Place(paths.checkpoints, "*/[!.]*"),
        "layer contents": Place(paths.layers, "[!.]*"),
        # Notes spare the making of a layer that the engine has. Data directories share them, as they share the engine.
        "layer notes": Place(paths.cache / "layers", "[!.]*", noted_layer),
        ROOT_FILE_SYSTEMS: Place(paths.cache / "rootfs", "[!.]*", lambda path: path.stem[:12]),
        "kept inputs": Place(paths.inputs, "[0-9a-f][0-9a-f]/[!.]*"),
        STORE: Place(paths.store, "[0-9a-f][0-9a-f]/[!.]*"),
        "quality measurements": Place(paths.cache / "quality", "[!.]*", lambda path: path.name[:KEY_DIGITS]),
        "searches of bisect": Place(paths.home / bisect.FOLDER, "[!.]*", lambda path: path.name),
        "begun builds": Place(paths.images, "[!.]*.begun", key_of_record),
        "build records": Place(paths.images, "[!.]*.json", key_of_record),
        # A record would pass for our own without its mark.
        "marks of imports": Place(paths.images, "[!.]*.imported", key_of_record),
    }


@dataclass(frozen=True)
class BuildRecords:
    """By the first 12 digits of their keys. unreadable: why those cannot be read."""

    readable: Mapping[str, Sequence[BuildRecord]]
    unreadable: Mapping[str, IntegrityError]

    @classmethod
    def read(cls, paths: Paths) -> BuildRecords:
        readable: dict[str, list[BuildRecord]] = {}
        unreadable: dict[str, IntegrityError] = {}
        for path in sorted(paths.images.glob("*.json")):
            try:
                readable.setdefault(key_of_record(path), []).append(read_record(path))
            except IntegrityError as error:
                unreadable[key_of_record(path)] = error
        return cls(readable, unreadable)

    def marks(self, keys: Iterable[str], *, required: bool = True) -> set[str]:
        """What the builds with these keys were made from, and those that they stand on. IntegrityError where a record
        that is `required` cannot be read: nobody knows then what it needs."""
        found, left = set[str](), [key[:12] for key in keys]
        while left:
            key = left.pop()
            if key in found:
                continue
            found.add(key)
            if required and key in self.unreadable:
                raise self.unreadable[key]
            for record in self.readable.get(key, ()):
                found |= marks_of_record(record)
                left += [record.parent_key[:12]] if record.parent_key else []
        return found


def marks_of_record(record: BuildRecord) -> set[str]:
    found = {file.sha256 for file in record.context} | {hex_of(diff_id) for diff_id in record.diff_ids}
    for spec in record.root_file_systems:
        found |= {spec.key[:12], *(deb.sha256 for deb in spec.debs)}
    return found


def marks_of_releases(
    paths: Paths, releases: Sequence[Release], records: BuildRecords, *, required: bool = True
) -> set[str]:
    """required: as of `BuildRecords.marks`."""
    found = records.marks((release.build_key for release in releases), required=required)
    for release in releases:
        found |= {release.checkpoint_key[:16], release.key[:KEY_DIGITS], *release.inputs.values()}
        found |= {hex_of(diff_id) for diff_id in release.diff_ids}
    return (
        found | marks_of_locks(paths, releases, required=required) | marks_of_searches(paths, releases, every=required)
    )


def marks_of_engine(images: Sequence[ImageInfo], records: BuildRecords) -> set[str]:
    """Images that the engine has stay explained, whoever made them."""
    keys = {tag[-12:] for image in images for tag in image.tags}
    return records.marks(keys, required=False) | {hex_of(one) for image in images for one in image.diff_ids}


def marks_of_project(project: Path) -> set[str]:
    """What the locks of the project name. Raises ManifestError."""
    found = set[str]()
    for path in sorted((project / "pins/stacks").glob("*.yaml")):
        if not path.with_suffix(".lock").is_file():
            continue  # not locked yet: nothing was fetched for it
        stack = load_stack(project, path.stem)
        lock = load_stack_lock(project, stack)
        found |= {rootfs_spec(stack, lock).key[:12], *(file.sha256 for file in lock.files)}
    for path in sorted((project / "pins/models").glob("*.lock")):
        found |= model_blobs(former_model_lock(project, path.stem))
    return found


def model_blobs(lock: ModelLock) -> set[str]:
    """SHA-256 of the headers and tensors that a lock names, and of the wheel that its model is made from."""
    wheel = {lock.gguf.wheel.sha256} if lock.gguf else set()
    return wheel | {blob.sha256 for entry in lock.repositories.values() for blob in blobs_of(entry)}


def marks_of_locks(paths: Paths, releases: Sequence[Release], *, required: bool = True) -> set[str]:
    """What the releases' own locks name, of which their images may use less. IntegrityError for a lock of another shape
    that is `required`: nobody knows then what its release needs."""
    found, inputs = set[str](), KeptInputs.of(paths)
    users = {row: release for release in releases for row in release.inputs.items()}
    for (name, sha256), release in sorted(users.items(), key=lambda item: item[0]):
        if not name.endswith(".lock") or not inputs.has_all([sha256]):
            continue
        text = inputs.read(sha256, name)
        try:
            if name.startswith("pins/models/"):
                found |= model_blobs(ModelLock.model_validate_json(text))
            elif name.startswith("pins/stacks/"):
                found |= {file.sha256 for file in StackLock.model_validate_json(text).files}
        except ValidationError as error:
            if required:
                record = Releases(paths).record_path(release)
                raise IntegrityError(
                    f"{release.tag}: its kept {name} is of another shape than this version reads "
                    f"({error.error_count()} faults)",
                    next_step=f"prune with the version that made it; or, if the release may go: rm {record}",
                ) from None
    return found


def marks_of_searches(paths: Paths, releases: Sequence[Release], *, every: bool) -> set[str]:
    """The searches of bisect that go by these releases. every: both are among them, else one is: a search stays while
    both stay, and goes with the first."""
    tags, found = {release.tag for release in releases}, set[str]()
    for path in searches(paths):
        with contextlib.suppress(ManifestError):
            if search := bisect.read(path / bisect.FILE):
                its = {search.good, search.bad}
                found |= {path.name} if (its <= tags if every else its & tags) else set()
    return found


def searches(paths: Paths) -> list[Path]:
    return sorted((paths.home / bisect.FOLDER).glob("[!.]*"))


def marks_of_running_searches(paths: Paths) -> set[str]:
    """Whose lock somebody holds."""
    found = set[str]()
    for path in searches(paths):
        if not (path / bisect.LOCK).is_file():  # to make it would be a touch
            continue
        try:
            with files.lock(path / bisect.LOCK, wait=False):
                pass
        except BusyError:
            found.add(path.name)
    return found


def marks_of_begun_builds(paths: Paths, records: BuildRecords, removed: set[str], now: float) -> set[str]:
    """A build may be under way, whose images have records already and whose release has none yet."""
    young = {key_of_record(path) for path in paths.images.glob("*.json") if not is_stale(path, now)}
    return records.marks(young - removed, required=False)


@dataclass(frozen=True)
class Sweep:
    """marks: of all that stays; removed: of what goes at once, unless something else needs it; now: seconds since the
    epoch."""

    paths: Paths
    marks: set[str]
    removed: set[str]
    now: float

    def files(self) -> dict[str, tuple[Path, ...]]:
        """By kind, in the order in which they are to go."""
        left = dict.fromkeys(left_over(self.paths))  # one data directory may lie in the other
        found = {"left by killed runs": tuple(path for path in left if is_stale(path, self.now))}
        return found | {kind: tuple(self.unneeded(place)) for kind, place in places_of(self.paths).items()}

    def unneeded(self, place: Place) -> Iterator[Path]:
        for path in sorted(place.folder.glob(place.pattern)):
            mark = place.mark(path)
            if mark not in self.marks and (mark in self.removed or is_stale(path, self.now)):
                yield path


def is_stale(path: Path, now: float) -> bool:
    """Whether nothing has touched it, or anything in a folder, for `STALE_AFTER`. A new link to a file is a touch."""
    try:
        entries = [path, *path.rglob("*")] if path.is_dir() else [path]
        times = [entry.lstat().st_ctime for entry in entries]
    except FileNotFoundError:  # a run works there
        return False
    return now - max(times) > STALE_AFTER


def left_over(paths: Paths) -> Iterator[Path]:
    """What runs have begun and not finished, or been killed at."""
    for root in (paths.home, paths.cache):
        for parent, folders, names in os.walk(root):
            found = sorted(name for name in (*folders, *names) if name.startswith(files.PARTIAL))
            yield from (Path(parent, name) for name in found)
            folders[:] = [name for name in folders if name not in found]
    for pattern in WORK:
        yield from sorted(paths.work.glob(pattern))
