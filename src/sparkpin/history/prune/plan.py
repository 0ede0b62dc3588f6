"""Remove old releases with everything that only they needed.

A dry run and a real one are the same plan: after the tags, a dry run goes on with the images that the engine would have
left, a real one with those that it has left.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sparkpin.build import begun
from sparkpin.core import disk, files, prune_lock
from sparkpin.core.errors import EngineError, InputError, ManifestError
from sparkpin.core.paths import Paths
from sparkpin.core.progress import waiting
from sparkpin.core.terminal import Say
from sparkpin.history.prune.garbage import GarbageSearch, Referenced, project_needs
from sparkpin.history.prune.image_tags import TagPlan, plan_tags
from sparkpin.history.prune.verdicts import Verdict, verdicts
from sparkpin.host import disk_usage
from sparkpin.host.disk_usage import BuildCache, EngineImage
from sparkpin.host.engine import Engine, engine_errors
from sparkpin.releases.container import CACHE_LABEL
from sparkpin.releases.keep import pins_of
from sparkpin.releases.quality_gate import is_refused
from sparkpin.releases.record import Release, Releases
from sparkpin.serve import linked

IMAGES, VOLUMES, STORE, RECORDS = "image layers", "cache volumes", "store", "release records"
BUILD_CACHE = "build cache"
NO_CACHE = BuildCache(records=0, bytes=0, holds_layers=False)
UNIX_SOCKET = "http+docker://localhost"  # as the SDK writes it: an engine whose folders may be those of this machine


@dataclass(frozen=True)
class CacheVolume:
    """image: config digest of the image whose caches it holds; folder: None where this user cannot look into it."""

    name: str
    image: str
    folder: Path | None


@dataclass(frozen=True)
class Seen:
    """What the engine has. used: image id -> container; volumes: those that no container mounts."""

    images: tuple[EngineImage, ...]
    used: Mapping[str, str]
    volumes: tuple[CacheVolume, ...]
    cache: BuildCache | None


@dataclass(frozen=True)
class Pruned:
    """What went, or would go. By kind: in the order in which they go."""

    verdicts: tuple[Verdict, ...]
    images: tuple[str, ...]  # tags of images that go besides those of releases
    volumes: tuple[str, ...]  # names
    files: Mapping[str, tuple[Path, ...]]  # by kind
    counts: Mapping[str, int]  # by kind
    bytes: Mapping[str, int]  # by kind
    held: int  # bytes of image layers, not in `bytes`, which the engine may keep until its build cache lets them go
    unmeasured: int  # cache volumes, not in `bytes`, that this user cannot look into
    unsized: int  # images, not wholly in `bytes`, whose layers' sizes the engine does not tell
    store_bytes: int | None  # that `store` would free besides, None where that is not known
    cache: BuildCache | None  # the engine's build cache, where it stays

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple(verdict.release.tag for verdict in self.verdicts if not verdict.reasons)

    @property
    def kept(self) -> dict[str, str]:
        """Tag of each release that stays -> why."""
        return {verdict.release.tag: ", ".join(verdict.reasons) for verdict in self.verdicts if verdict.reasons}

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


def prune(
    paths: Paths,
    engine: Engine,
    keep: int,
    say: Say,
    *,
    now: float,
    dry_run: bool = False,
    store: bool = False,
    build_cache: bool = False,
    ignored: Collection[str] = (),
) -> Pruned:
    """Keep `keep` releases of each recipe, and whatever `verdicts` keeps besides.

    Records of releases go last, so that a killed run can be repeated.

    Args:
        now: seconds since the epoch.
        store: remove what nothing needs from the store of fetched files, too.
        build_cache: clear the engine's build cache, too, of everybody's builds: it lets go of layers that go.
        ignored: ids of containers that count as gone.
    """
    if keep < 0:
        raise InputError(f"keep: saw {keep}, wanted 0 or more", next_step="invoke prune --keep 2")
    records = Releases(paths)
    with contextlib.ExitStack() as stack:
        if not dry_run:
            stack.enter_context(prune_lock.alone(paths, say))
            for recipe in records.recipes():
                stack.enter_context(records.locked(recipe))
            if store:
                stack.enter_context(files.lock(paths.locks / "store.lock", on_wait=lambda: say("waiting for a fetch")))
        needs = needs_of_project(paths, say, required=store)
        with waiting(say, "asking the engine for its images"):
            seen = look(engine, ignored)
        verdicts = judge(paths, seen, keep)
        remaining, removed = split(verdicts)
        tags = plan_tags(seen.images, seen.used, remaining, removed, begun.made_here(paths), now)
        images = tuple(sorted(tags.internal))
        if dry_run:
            after = tags.applied(seen.images)
        else:
            stuck = remove_tags(engine, tags, say)
            with waiting(say, "asking the engine for its images"):
                after = tuple(disk_usage.inventory(engine))
            verdicts = tuple(
                replace(verdict, reasons=(stuck[verdict.release.tag],)) if verdict.release.tag in stuck else verdict
                for verdict in verdicts
            )
            remaining, removed = split(verdicts)
            images = tuple(tag for tag in images if tag not in stuck)
        with waiting(say, "looking at what nothing needs"):
            search = GarbageSearch(paths, remaining, removed, after, needs, now)
            holding = NO_CACHE if build_cache else seen.cache
            freed = disk_usage.freed(seen.images, after, holding)
            present = {image.config_digest for image in after}
            volumes = tuple(volume for volume in seen.volumes if volume.image not in present)
            pruned = sum_up(verdicts, images, freed, search, volumes, holding, store=store)
        if not dry_run:
            remove_volumes(engine, volumes, say)
            linked.drop_volumes(paths, removed, remaining, say)
            for kind, going in pruned.files.items():
                for path in going:
                    disk.remove_path(path)
                say(f"removed {kind}: {len(going)}")
        if build_cache:
            pruned = with_cache(pruned, *cache_going(engine, seen.cache, say, dry_run=dry_run))
    return pruned


def cache_going(engine: Engine, cache: BuildCache | None, say: Say, *, dry_run: bool) -> tuple[int, int]:
    """How many records of the build cache go, and their bytes; nothing in a dry run that cannot see them."""
    if dry_run:
        return (cache.records, cache.bytes) if cache else (0, 0)
    with waiting(say, "clearing the engine's build cache"):
        return disk_usage.clear_build_cache(engine)


def with_cache(pruned: Pruned, records: int, size: int) -> Pruned:
    if not records:
        return pruned
    counts, sizes = {**pruned.counts, BUILD_CACHE: records}, {**pruned.bytes, BUILD_CACHE: size}
    return replace(pruned, counts=counts, bytes=sizes)


def judge(paths: Paths, seen: Seen, keep: int) -> tuple[Verdict, ...]:
    records, there = Releases(paths), {image.config_digest for image in seen.images}

    def passed_over(release: Release) -> bool:
        is_gone = release.image not in there or not records.checkpoint(release).is_dir()
        return is_gone or is_refused(paths, release)

    users = {tag: seen.used[image.id] for image in seen.images if image.id in seen.used for tag in image.tags}
    return tuple(
        verdict
        for recipe in records.recipes()
        for verdict in verdicts(
            records.of_recipe(recipe), records.before(recipe), keep, pins_of(records, recipe), users, passed_over
        )
    )


def split(verdicts: Sequence[Verdict]) -> tuple[list[Release], list[Release]]:
    """The releases that remain, and those that go."""
    return [v.release for v in verdicts if v.reasons], [v.release for v in verdicts if not v.reasons]


def needs_of_project(paths: Paths, say: Say, *, required: bool) -> Referenced | None:
    """None, unless it is `required`, when a pin or a lock is broken: nobody knows then what it needs."""
    try:
        return project_needs(paths.project)
    except ManifestError as error:
        if required:
            raise
        say(f"root file systems stay, since the pins cannot be read: {error.message}")
        return None


def sum_up(
    verdicts: tuple[Verdict, ...],
    images: tuple[str, ...],
    freed: disk_usage.Freed,
    search: GarbageSearch,
    volumes: Sequence[CacheVolume],
    cache: BuildCache | None,
    *,
    store: bool,
) -> Pruned:
    in_store, known = search.store(), Releases(search.paths)
    records = tuple(known.record_path(release) for release in search.removed)
    kinds = {**search.files(), STORE: (in_store or ()) if store else (), RECORDS: records}
    going = {kind: paths for kind, paths in kinds.items() if paths}
    measured = [volume.folder for volume in volumes if volume.folder]
    sizes = disk.freed_bytes({VOLUMES: measured, **going, "store besides": () if store else in_store or ()})
    besides = sizes.pop("store besides")
    counts = {IMAGES: freed.count, VOLUMES: len(volumes), **{kind: len(paths) for kind, paths in going.items()}}
    return Pruned(
        verdicts=verdicts,
        images=images,
        volumes=tuple(volume.name for volume in volumes),
        files=going,
        counts={kind: count for kind, count in counts.items() if count},
        bytes={kind: size for kind, size in {IMAGES: freed.bytes - freed.held, **sizes}.items() if counts[kind]},
        held=freed.held,
        unmeasured=len(volumes) - len(measured),
        unsized=freed.unsized,
        store_bytes=None if in_store is None else besides,
        cache=cache,
    )


def look(engine: Engine, ignored: Collection[str]) -> Seen:
    with engine_errors():
        containers = [c for c in engine.client.api.containers(all=True) if c["Id"] not in ignored]
        found = engine.client.volumes.list(filters={"label": CACHE_LABEL})
    volumes = sorted(found, key=lambda volume: volume.name)  # an engine lists them in any order
    mounted = {mount.get("Name") for container in containers for mount in container.get("Mounts") or ()}
    return Seen(
        images=tuple(disk_usage.inventory(engine)),
        # A stopped container counts: it may be started again.
        used={c["ImageID"]: (c["Names"] or [c["Id"][:12]])[0].removeprefix("/") for c in containers},
        volumes=tuple(cache_volume(engine, volume.attrs) for volume in volumes if volume.name not in mounted),
        cache=disk_usage.build_cache(engine),
    )


def cache_volume(engine: Engine, attrs: Mapping[str, Any]) -> CacheVolume:
    folder: Path | None = Path(attrs["Mountpoint"]) if engine.client.api.base_url == UNIX_SOCKET else None
    try:
        os.listdir(folder or "")
    except OSError:
        folder = None
    return CacheVolume(attrs["Name"], (attrs.get("Labels") or {}).get(CACHE_LABEL, ""), folder)


def remove_tags(engine: Engine, plan: TagPlan, say: Say) -> dict[str, str]:
    """Returns tag -> why the engine would not let it go (a container was started in the meantime)."""
    stuck: dict[str, str] = {}
    for tag, target in plan.retag.items():
        engine.tag(target, tag)
    for tag in plan.untag:
        try:
            engine.untag(tag)
        except EngineError as error:
            say(f"kept {tag}: {error.message}")
            stuck[tag] = error.message
    return stuck


def remove_volumes(engine: Engine, volumes: Sequence[CacheVolume], say: Say) -> None:
    for volume in volumes:
        try:
            with engine_errors():
                engine.client.volumes.get(volume.name).remove()
            say(f"removed the cache volume {volume.name}")
        except EngineError as error:
            say(f"kept the cache volume {volume.name}: {error.message}")
