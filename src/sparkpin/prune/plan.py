"""Remove old releases with everything that only they needed.

A dry run and a real one are the same plan: after the tags, a dry run goes on with the images that the engine would have
left, a real one with those that it has left.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sparkpin.build.record import keys_here
from sparkpin.core import files, locks
from sparkpin.core.errors import DiskError, EngineError, InputError, ManifestError
from sparkpin.core.paths import Paths
from sparkpin.core.progress import waiting
from sparkpin.core.terminal import Say
from sparkpin.host import disk_usage
from sparkpin.host.disk_usage import EngineImage
from sparkpin.host.engine import Engine, engine_errors
from sparkpin.prune.garbage import GarbageSearch, Referenced, project_needs
from sparkpin.prune.image_tags import TagPlan, plan_tags
from sparkpin.prune.verdicts import Verdict, verdicts
from sparkpin.releases.container import CACHE_LABEL
from sparkpin.releases.keep import pins_of
from sparkpin.releases.quality_gate import is_refused
from sparkpin.releases.record import Release, Releases
from sparkpin.serve import linked

STORE, RECORDS = "store", "release records"


@dataclass(frozen=True)
class Seen:
    """What the engine has. used: image id -> container; volumes: name -> config digest of the image whose caches it
    holds, of those that no container mounts."""

    images: tuple[EngineImage, ...]
    used: Mapping[str, str]
    volumes: Mapping[str, str]


@dataclass(frozen=True)
class Pruned:
    """What went, or would go."""

    verdicts: tuple[Verdict, ...]
    images: tuple[str, ...]  # tags of images that go besides those of releases
    volumes: tuple[str, ...]  # names
    files: Mapping[str, tuple[Path, ...]]  # by kind, in the order in which they go
    store: int | None  # files of the store that nothing needs and that stay; None where that is not known

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple(verdict.release.tag for verdict in self.verdicts if not verdict.reasons)

    @property
    def kept(self) -> dict[str, str]:
        """Tag of each release that stays -> why."""
        return {verdict.release.tag: ", ".join(verdict.reasons) for verdict in self.verdicts if verdict.reasons}


def prune(
    paths: Paths,
    engine: Engine,
    keep: int,
    say: Say,
    *,
    now: float,
    dry_run: bool = False,
    store: bool = False,
    ignored: Collection[str] = (),
) -> Pruned:
    """Keep `keep` releases of each recipe, and whatever `verdicts` keeps besides.

    Records of releases go last, so that a killed run can be repeated.

    Args:
        now: seconds since the epoch.
        store: remove what nothing needs from the store of fetched files, too.
        ignored: ids of containers that count as gone.
    """
    if keep < 0:
        raise InputError(f"--keep: got {keep}, expected 0 or more", next_step="invoke prune --keep 2")
    with contextlib.nullcontext() if dry_run else alone(paths, say, store=store):
        needs = needs_of_project(paths, say, required=store)
        with waiting(say, "asking the engine for its images"):
            seen = look(engine, ignored)
        found = judge(paths, seen, keep)
        remaining, removed = split(found)
        tags = plan_tags(seen.images, seen.used, remaining, removed, keys_here(paths), now)
        after = tags.applied(seen.images)
        images = tuple(sorted(tags.internal))
        if not dry_run:
            stuck = remove_tags(engine, tags, say)
            after = tuple(disk_usage.inventory(engine))
            found = tuple(replace(v, reasons=(*v.reasons, *stuck.get(v.release.tag, ()))) for v in found)
            remaining, removed = split(found)
            images = tuple(tag for tag in images if tag not in stuck)
        with waiting(say, "looking at what nothing needs"):
            search = GarbageSearch(paths, remaining, removed, after, needs, now)
            in_store = search.store()
            records = tuple(Releases(paths).record_path(release) for release in removed)
            kinds = {**search.files(), STORE: (in_store or ()) if store else (), RECORDS: records}
        present = {image.config_digest for image in after}
        volumes = tuple(name for name, image in seen.volumes.items() if image not in present)
        going = {kind: some for kind, some in kinds.items() if some}
        if not dry_run:
            remove_volumes(engine, volumes, say)
            linked.drop_volumes(paths, removed, remaining, say)
            for kind, some in going.items():
                for path in some:
                    remove_path(path)
                say(f"removed {kind}: {len(some)}")
        left = None if in_store is None else 0 if store else len(in_store)
    return Pruned(found, images, volumes, going, left)


@contextlib.contextmanager
def alone(paths: Paths, say: Say, *, store: bool) -> Iterator[None]:
    """No build, import, smoke test or promotion runs meanwhile; nor a fetch, where the store is pruned."""
    records = Releases(paths)
    with contextlib.ExitStack() as stack:
        stack.enter_context(locks.claim(paths, say, exclusive=True))
        for recipe in records.recipes():
            stack.enter_context(records.locked(recipe))
        if store:
            stack.enter_context(files.lock(paths.locks / "store.lock", on_wait=lambda: say("waiting for a fetch")))
        yield


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


def look(engine: Engine, ignored: Collection[str]) -> Seen:
    with engine_errors():
        containers = [c for c in engine.client.api.containers(all=True) if c["Id"] not in ignored]
        volumes = engine.client.volumes.list(filters={"label": CACHE_LABEL})
    mounted = {mount.get("Name") for container in containers for mount in container.get("Mounts") or ()}
    return Seen(
        images=tuple(disk_usage.inventory(engine)),
        # A stopped container counts: it may be started again.
        used={c["ImageID"]: (c["Names"] or [c["Id"][:12]])[0].removeprefix("/") for c in containers},
        volumes={
            volume.name: (volume.attrs.get("Labels") or {}).get(CACHE_LABEL, "")
            for volume in sorted(volumes, key=lambda volume: str(volume.name))
            if volume.name not in mounted
        },
    )


def remove_tags(engine: Engine, plan: TagPlan, say: Say) -> dict[str, tuple[str]]:
    """Returns tag -> why the engine would not let it go (a container was started in the meantime)."""
    stuck: dict[str, tuple[str]] = {}
    for tag, target in plan.retag.items():
        engine.tag(target, tag)
    for tag in plan.untag:
        try:
            engine.untag(tag)
        except EngineError as error:
            say(f"kept {tag}: {error.message}")
            stuck[tag] = (error.message,)
    return stuck


def remove_volumes(engine: Engine, volumes: Sequence[str], say: Say) -> None:
    for name in volumes:
        try:
            with engine_errors():
                engine.client.volumes.get(name).remove()
            say(f"removed the cache volume {name}")
        except EngineError as error:
            say(f"kept the cache volume {name}: {error.message}")


def remove_path(path: Path) -> None:
    """Remove a file or folder, or DiskError. One that is not there is no error.

    A folder is renamed first: a removal that is killed must not leave half a checkpoint that looks whole.
    """
    left = path
    try:
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
            return
        doomed = Path(tempfile.mkdtemp(prefix=files.PARTIAL, dir=path.parent))
        left = path.replace(doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        raise DiskError(f"cannot remove {path}: {error}", next_step=f"sudo rm -r {left}") from error
