"""Remove old releases with everything that only they needed. A plan is data; carrying it out is a second step.

What no record has ever named (a stage's image, a checkpoint, a partial file) may belong to a build that runs right now,
so it goes only when nothing touched it for `STALE_AFTER`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from sparkpin import files, layers
from sparkpin.container import CACHE_LABEL
from sparkpin.engine import Engine, engine_errors
from sparkpin.errors import DiskError, EngineError, InputError
from sparkpin.paths import Paths
from sparkpin.releases import INTERNAL, ROOTFS, UNSEALED, Release, Releases
from sparkpin.retention import rollback_target

STALE_AFTER = 3600.0  # seconds
BUILD_FOLDERS = ("context-*", "seal-*")  # what a build works in; a killed one's next run looks for its own key only
OURS = re.compile(r"^sparkpin/(?P<repository>[^:/]+):(?P<name>.+)$")


@dataclass(frozen=True)
class Freed:
    """tags: releases removed; bytes: disk space, image_bytes of them in the engine; kept: tag -> why it had to stay."""

    tags: tuple[str, ...]
    bytes: int
    image_bytes: int
    kept: dict[str, str]


@dataclass(frozen=True)
class Plan:
    """retag: moving tag -> release tag that it must name afterwards."""

    releases: tuple[Release, ...]
    untag: tuple[str, ...]
    retag: dict[str, str]
    folders: tuple[Path, ...]
    kept: dict[str, str]


def prune(paths: Paths, engine: Engine, keep: int, say: Callable[[str], None]) -> Freed:
    """Keep `keep` releases of each recipe: the current one, the one to roll back to, and the newest, good ones first.

    A release whose image is in use by a container stays. Records go last, so that a killed run can be repeated.
    """
    if keep < 0:
        raise InputError(f"keep: saw {keep}, wanted 0 or more", next_step="invoke prune --keep 2")
    records = Releases(paths)
    with contextlib.ExitStack() as stack:
        for recipe in records.recipes():
            stack.enter_context(records.locked(recipe))
        before = layers.inventory(engine)
        plan = make_plan(records, before, users(engine), keep, now=time.time())
        for tag, why in plan.kept.items():
            say(f"kept {tag}: {why}")
        stuck = remove_tags(engine, plan, say)
        remove_caches(engine, say)
        after = layers.all_layers(layers.inventory(engine))
        image_bytes = sum(size for chain, size in layers.all_layers(before).items() if chain not in after)
        removed = [release for release in plan.releases if release.tag not in stuck]
        staying = [release for release in records.all() if release not in removed]
        needed = {folder for release in staying for folder in (records.checkpoint(release), records.evidence(release))}
        file_bytes = 0
        for folder in plan.folders:
            if folder not in needed and os.path.lexists(folder):
                file_bytes += remove_path(folder)
                say(f"removed {folder}")
        for release in removed:
            records.forget(release)
            say(f"removed {release.tag}")
    return Freed(
        tags=tuple(release.tag for release in removed),
        bytes=image_bytes + file_bytes,
        image_bytes=image_bytes,
        kept={**plan.kept, **stuck},
    )


def make_plan(
    records: Releases, images: list[layers.EngineImage], used: dict[str, str], keep: int, *, now: float
) -> Plan:
    """used: image id -> container that uses it; now: seconds since the epoch. Reads folders, changes nothing."""
    ids = {tag: image.id for image in images for tag in image.tags}
    remaining: list[Release] = []
    removed: list[Release] = []
    kept: dict[str, str] = {}
    for recipe in records.recipes():
        for place, release in enumerate(by_worth(records.of_recipe(recipe))):
            user = used.get(ids.get(release.tag, ""))
            if place < keep or release.state == "current":
                remaining.append(release)
            elif user:
                remaining.append(release)
                kept[release.tag] = f"the container {user} uses its image (docker rm {user} once it is not needed)"
            else:
                removed.append(release)
    moving, retag = moving_tags(remaining, removed, ids)
    release_tags = [release.tag for release in removed if release.tag in ids]
    leaving = {*release_tags, *moving, *retag}
    return Plan(
        releases=tuple(removed),
        untag=(*release_tags, *moving, *internal_tags(images, used, remaining, removed, leaving, now)),
        retag=retag,
        folders=tuple(stale_folders(records, remaining, removed, now)),
        kept=kept,
    )


def by_worth(releases: list[Release]) -> list[Release]:
    """The current release, the one that `rollback` goes to, the newest others that passed, and then the rest."""
    current = next((release for release in releases if release.state == "current"), None)
    back = rollback_target(releases, current) if current else None
    return sorted(releases, key=lambda r: (r == current, r == back, r.is_good, r.age), reverse=True)


def moving_tags(
    remaining: list[Release], removed: list[Release], ids: dict[str, str]
) -> tuple[list[str], dict[str, str]]:
    """The moving tags that go, and those that must name another release: the newest that remains of the stage."""
    gone: list[str] = []
    retag: dict[str, str] = {}
    for recipe, stage in sorted({(release.recipe, release.stage) for release in removed}):
        tag = f"sparkpin/{recipe}:{stage}"
        others = [r for r in remaining if (r.recipe, r.stage) == (recipe, stage) and r.tag in ids]
        if others:
            retag[tag] = max(others, key=lambda release: release.age).tag
        elif tag in ids:
            gone.append(tag)
    current = {release.recipe: release for release in remaining if release.state == "current"}
    for recipe in sorted({release.recipe for release in removed}):
        tag = f"sparkpin/{recipe}:current"
        if tag in ids and recipe in current and current[recipe].tag in ids:
            retag[tag] = current[recipe].tag
        elif tag in ids and recipe not in current:
            gone.append(tag)
    return gone, {tag: target for tag, target in retag.items() if ids.get(tag) != ids[target]}


def internal_tags(
    images: list[layers.EngineImage],
    used: dict[str, str],
    remaining: list[Release],
    removed: list[Release],
    leaving: set[str],
    now: float,
) -> Iterator[str]:
    """Tags of stages' images and root file systems that no remaining release stands on, and of unfinished images.

    Releases of another home on the same engine count too: their records are not here, their tags are. leaving: the tags
    that will no longer name what they name now.
    """

    def is_internal(tag: str) -> bool:
        name = OURS.match(tag)
        return name is not None and (
            name["repository"].startswith(INTERNAL) or name["repository"] in (ROOTFS, UNSEALED)
        )

    def is_stale(image: layers.EngineImage) -> bool:
        return image.tagged is not None and now - datetime.fromisoformat(image.tagged).timestamp() > STALE_AFTER

    others = [
        image.diff_ids
        for image in images
        for tag in image.tags
        if OURS.match(tag) and not is_internal(tag) and tag not in leaving
    ]
    needed = [*(release.diff_ids for release in remaining), *others]
    for image in images:
        internal = [tag for tag in image.tags if is_internal(tag)]
        if not internal or image.id in used:
            continue
        if all(tag.startswith(f"sparkpin/{UNSEALED}:") for tag in internal):  # a killed build left it
            yield from internal if is_stale(image) else ()
            continue
        if any(layers.is_below(image.diff_ids, upper) for upper in needed):
            continue
        was_theirs = any(layers.is_below(image.diff_ids, release.diff_ids) for release in removed)
        if was_theirs or is_stale(image):
            yield from internal


def stale_folders(records: Releases, remaining: list[Release], removed: list[Release], now: float) -> Iterator[Path]:
    """Evidence and checkpoints of the removed, checkpoints that no release needs, and what killed runs left."""
    yield from (records.evidence(release) for release in removed if records.evidence(release).is_dir())
    needed = {records.checkpoint(release) for release in remaining}
    theirs = {records.checkpoint(release) for release in removed} - needed
    yield from sorted(folder for folder in theirs if folder.is_dir())
    paths = records.paths
    for folder in sorted(paths.checkpoints.glob("*/[!.]*")):
        if folder.is_dir() and folder not in needed | theirs and now - last_touched(folder) > STALE_AFTER:
            yield folder
    left_over = [path for root in (paths.home, paths.cache) for path in sorted(partials(root))]
    left_over += sorted(path for pattern in BUILD_FOLDERS for path in paths.work.glob(pattern))
    yield from (left for left in left_over if now - last_touched(left) > STALE_AFTER)


def partials(root: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(root):
        found = [name for name in (*folders, *names) if name.startswith(files.PARTIAL)]
        yield from (Path(parent, name) for name in found)
        folders[:] = [name for name in folders if name not in found]


def last_touched(path: Path) -> float:
    """Seconds since the epoch of the last change of a file or of anything in a folder."""
    times = [path.lstat().st_ctime]
    for entry in path.rglob("*") if path.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):  # a run that works there is the newest of all
            times.append(entry.lstat().st_ctime)
    return max(times)


def users(engine: Engine) -> dict[str, str]:
    """Image id -> name of a container that uses it. A stopped one counts: it may be started again."""
    with engine_errors():
        containers = engine.client.api.containers(all=True)
    return {
        container["ImageID"]: (container["Names"] or [container["Id"][:12]])[0].removeprefix("/")
        for container in containers
    }


def remove_tags(engine: Engine, plan: Plan, say: Callable[[str], None]) -> dict[str, str]:
    """Returns release tag -> why the engine would not let it go (a container was started in the meantime)."""
    stuck: dict[str, str] = {}
    release_tags = {release.tag for release in plan.releases}
    for tag, target in plan.retag.items():
        engine.tag(target, tag)
    for tag in plan.untag:
        try:
            engine.untag(tag)
        except EngineError as error:
            say(f"kept {tag}: {error.message}")
            if tag in release_tags:
                stuck[tag] = error.message
    return stuck


def remove_caches(engine: Engine, say: Callable[[str], None]) -> None:
    """Volumes that keep the caches of an image which the engine no longer has."""
    with engine_errors():
        volumes = engine.client.volumes.list(filters={"label": CACHE_LABEL})
    for volume in volumes:
        if engine.image((volume.attrs.get("Labels") or {}).get(CACHE_LABEL, "")) is None:
            try:
                with engine_errors():
                    volume.remove()
                say(f"removed the cache volume {volume.name}")
            except EngineError as error:
                say(f"kept the cache volume {volume.name}: {error.message}")


def remove_path(path: Path) -> int:
    """Remove a file or folder; returns the bytes that the disk gets back (a file with other links gives none).

    A folder is renamed first: a removal that is killed must not leave half a checkpoint that looks whole.
    """
    entries: Iterable[Path] = (path, *path.rglob("*")) if path.is_dir() and not path.is_symlink() else (path,)
    freed = sum(
        stat.st_blocks * 512 for entry in entries if (stat := entry.lstat()).st_nlink == 1 and not entry.is_dir()
    )
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return freed
    doomed = Path(tempfile.mkdtemp(prefix=files.PARTIAL, dir=path.parent))
    path.replace(doomed)
    try:
        shutil.rmtree(doomed)
    except OSError as error:
        raise DiskError(f"cannot remove {path}: {error}", next_step=f"sudo rm -r {doomed}") from error
    return freed
