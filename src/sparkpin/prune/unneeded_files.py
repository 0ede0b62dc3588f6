"""Files of SPARKPIN_HOME and SPARKPIN_CACHE that nothing needs any more: mark and sweep.

A mark is a name: a SHA-256, a diff ID, the first digits of a key. What stays (releases, images of the engine, and for
the store of fetched files the project's locks) marks the names of all that it needs. A file whose name has no mark goes
at once where a removed release had marked it, else when nothing has touched it for `STALE_AFTER`. A prune waits for
builds and imports (`core/locks`), but not for the making of a checkpoint, and a dry run waits for nobody.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from sparkpin.build.record import BuildRecord, read_record
from sparkpin.core import files
from sparkpin.core.errors import IntegrityError
from sparkpin.core.paths import Paths
from sparkpin.fetch.model_files import blobs_of
from sparkpin.host.images import ImageInfo
from sparkpin.pins.schema import ModelLock, StackLock
from sparkpin.prune.images import STALE_AFTER
from sparkpin.releases.kept_inputs import read_inputs
from sparkpin.releases.quality_record import KEY_DIGITS
from sparkpin.releases.record import Release
from sparkpin.upgrade import bisect_search as search

WORK = ("context-*", "saved-*", "seal-*", "publish-*", "pull-*")
"""What a build works in, whose next run looks for its own key only, and layers for registries."""
STORE = "store"


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
        "root file systems": Place(paths.cache / "rootfs", "[!.]*", lambda path: path.stem[:12]),
        "kept inputs": Place(paths.inputs, "[0-9a-f][0-9a-f]/[!.]*"),
        STORE: Place(paths.store, "[0-9a-f][0-9a-f]/[!.]*"),
        "quality measurements": Place(paths.cache / "quality", "[!.]*", lambda path: path.name[:KEY_DIGITS]),
        "searches of bisect": Place(paths.home / search.FOLDER, "[!.]*", lambda path: path.name.rpartition("-")[0]),
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


def marks_of_releases(releases: Sequence[Release], records: BuildRecords, *, required: bool = True) -> set[str]:
    """required: as of `BuildRecords.marks`."""
    found = records.marks((release.build_key for release in releases), required=required)
    for release in releases:
        found |= {release.checkpoint_key[:16], release.key[:KEY_DIGITS], *release.inputs.values()}
        found |= {hex_of(diff_id) for diff_id in release.diff_ids}
        found |= {f"{release.key[:12]}-{other.key[:12]}" for other in releases}  # a search between the two
    return found


def marks_of_engine(images: Sequence[ImageInfo], records: BuildRecords) -> set[str]:
    """Images that the engine has stay explained, whoever made them."""
    keys = {tag[-12:] for image in images for tag in image.tags}
    return records.marks(keys, required=False) | {hex_of(one) for image in images for one in image.diff_ids}


def marks_of_locks(paths: Paths, staying: Sequence[Release]) -> set[str]:
    """What the locks of the project and of these releases name, of which the images may use less. IntegrityError for a
    lock of another shape: nobody knows then what it needs."""
    files = sorted((paths.project / "pins").glob("*/*.lock"))
    locks = {file.read_bytes(): str(file) for file in files}
    for release in staying:
        inputs = read_inputs(paths, release, "pins/")
        locks |= {text: f"{release.tag}: {name}" for name, text in inputs.items() if name.endswith(".lock")}
    found = set[str]()
    for text, name in locks.items():
        try:
            if "pins/models/" in name:
                found |= model_blobs(ModelLock.model_validate_json(text))
            else:
                found |= {file.sha256 for file in StackLock.model_validate_json(text).files}
        except ValidationError as error:
            fault = f"{name}: a lock of another shape than this version reads ({error.error_count()} faults)"
            raise IntegrityError(fault, next_step="leave --store out, or correct or remove what has it") from None
    return found


def model_blobs(lock: ModelLock) -> set[str]:
    """SHA-256 of the headers and tensors that a lock names, and of the wheel that its model is made from."""
    wheel = {lock.gguf.wheel.sha256} if lock.gguf else set()
    return wheel | {blob.sha256 for entry in lock.repositories.values() for blob in blobs_of(entry)}


def marks_of_begun_builds(paths: Paths, records: BuildRecords, removed: set[str], now: float) -> set[str]:
    """A build may be under way, whose images have records already and whose release has none yet."""
    young = {key_of_record(path) for path in paths.images.glob("*.json") if not is_stale(path, now)}
    return records.marks(young - removed, required=False)


def unneeded_files(
    paths: Paths, marks: set[str], removed: set[str], now: float, *, store: bool
) -> dict[str, tuple[Path, ...]]:
    """By kind, in the order in which they are to go. marks: of all that stays; removed: of what goes at once, unless
    something else needs it; now: seconds since the epoch; store: that of fetched files, too."""
    left = dict.fromkeys(left_over(paths))  # one data directory may lie in the other
    found = {"left by killed runs": tuple(path for path in left if is_stale(path, now))}

    def is_unneeded(path: Path, mark: str) -> bool:
        return mark not in marks and (mark in removed or is_stale(path, now))

    for kind, place in places_of(paths).items():
        if store or kind != STORE:
            entries = sorted(place.folder.glob(place.pattern))
            found[kind] = tuple(path for path in entries if is_unneeded(path, place.mark(path)))
    return found


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
            if Path(parent).parent != paths.releases:  # there whoever takes the lock of the records removes it
                yield from (Path(parent, name) for name in found)
            folders[:] = [name for name in folders if name not in found]
    for pattern in WORK:
        yield from sorted(paths.work.glob(pattern))
