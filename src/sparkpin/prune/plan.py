"""Remove old releases with everything that only they needed. A dry run and a real one are the same plan."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from sparkpin.build.record import keys_here
from sparkpin.core import files, locks
from sparkpin.core.errors import DiskError
from sparkpin.core.paths import Paths
from sparkpin.core.progress import waiting
from sparkpin.core.terminal import say
from sparkpin.host.engine import Engine, engine_errors
from sparkpin.prune import unneeded_files as sweep
from sparkpin.prune.images import EngineState, read_engine, unneeded_tags
from sparkpin.releases.promotions import landing
from sparkpin.releases.protection import Protection, protections_of
from sparkpin.releases.quality_gate import is_refused
from sparkpin.releases.record import Release, Releases


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """What went, or would go. tags: of images, those of releases included; volumes: names; files: by kind, in the order
    in which they go."""

    verdicts: tuple[Verdict, ...]
    tags: tuple[str, ...]
    volumes: tuple[str, ...]
    files: Mapping[str, tuple[Path, ...]]

    @property
    def removed(self) -> list[Release]:
        return [verdict.release for verdict in self.verdicts if not verdict.reasons]


@dataclass(frozen=True, kw_only=True)
class PruneOptions:
    """keep: releases of each recipe; store: remove unneeded files from the store of fetched files, too; ignored:
    ids of containers that count as gone; served: tags that a server may be started of, and its container's name; now:
    seconds since the epoch."""

    keep: int
    now: float
    dry_run: bool = False
    store: bool = False
    ignored: Collection[str] = ()
    served: Mapping[str, str] = field(default_factory=dict)


def prune(paths: Paths, engine: Engine, options: PruneOptions) -> Pruned:
    """Keep `keep` releases of each recipe, and whatever `verdicts` keeps besides.

    Records of releases go last, so that a killed run can be repeated.
    """
    with contextlib.nullcontext() if options.dry_run else exclusive(paths, store=options.store):
        with waiting("looking at unneeded files"):
            done = make_plan(paths, read_engine(engine, options.ignored), options)
        if not options.dry_run:
            remove(engine, done)
    return done


def make_plan(paths: Paths, state: EngineState, options: PruneOptions) -> Pruned:
    found = judge(paths, state, options)
    staying = [verdict.release for verdict in found if verdict.reasons]
    removed = [verdict.release for verdict in found if not verdict.reasons]
    tags = unneeded_tags(state, staying, removed, keys_here(paths), options.now)
    images = state.without(tags)
    builds = sweep.BuildRecords.read(paths)
    going = sweep.marks_of_releases(removed, builds, required=False)
    marks = sweep.marks_of_releases(staying, builds) | sweep.marks_of_engine(images, builds)
    marks |= sweep.marks_of_begun_builds(paths, builds, going, options.now)
    if options.store:
        marks |= sweep.marks_of_locks(paths, staying)
    kinds = sweep.unneeded_files(paths, marks, going, options.now, store=options.store)
    known = Releases(paths)
    places = (place for one in removed for place in (known.evidence(one), known.record_path(one)))
    kinds["release records"] = tuple(place for place in places if place.exists())
    present = {image.config_digest for image in images}
    return Pruned(
        verdicts=found,
        tags=tags,
        volumes=tuple(name for name, image in state.volumes.items() if image not in present),
        files={kind: some for kind, some in kinds.items() if some},
    )


def remove(engine: Engine, done: Pruned) -> None:
    for tag in done.tags:
        engine.untag(tag)
    for name in done.volumes:
        with engine_errors():
            engine.client.volumes.get(name).remove()
    for kind, some in done.files.items():
        for path in some:
            remove_path(path)
        say(f"removed {kind}: {len(some)}")


@contextlib.contextmanager
def exclusive(paths: Paths, *, store: bool) -> Iterator[None]:
    """No build, import, smoke test or promotion runs meanwhile; nor a fetch, where the store is pruned."""
    records = Releases(paths)
    with contextlib.ExitStack() as stack:
        stack.enter_context(locks.claim(paths, exclusive=True))
        for recipe in records.recipes():
            stack.enter_context(records.locked(recipe))
        if store:
            stack.enter_context(files.lock(paths.locks / "store.lock", on_wait="waiting for a fetch"))
        yield


def judge(paths: Paths, state: EngineState, options: PruneOptions) -> tuple[Verdict, ...]:
    records = Releases(paths)
    refused = partial(is_refused, paths, present={image.config_digest for image in state.images})

    def of_recipe(name: str) -> list[Verdict]:
        releases, before, used = records.of_recipe(name), records.before(name), {**options.served, **state.users}
        return verdicts(releases, before, options.keep, protections_of(records, name), used, refused)

    return tuple(verdict for name in records.recipes() for verdict in of_recipe(name))


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


@dataclass(frozen=True)
class Verdict:
    """What `prune` makes of a release. reasons: why it stays; none: it goes."""

    release: Release
    reasons: tuple[str, ...]


def verdicts(
    releases: Sequence[Release],
    before: Sequence[str],
    keep: int,
    protections: Mapping[str, Protection],
    used: Mapping[str, str],
    refused: Callable[[Release], bool],
) -> list[Verdict]:
    """For the releases of one recipe (from the oldest to the newest), the most worthy first.

    The first `keep` stay, the current one counted. Whatever `keep` is, so do the current one, what was current before
    and a rollback would land on, the newest that passed, the protected, and those whose image a container uses.
    before: `Releases.before`; used: release tag -> name of the container; refused: whether a rollback passes it over.
    """
    current = next((release for release in releases if release.state == "current"), None)
    back = landing(releases, current, before, refused) if current else None
    passed_last = next((release for release in reversed(releases) if release.is_good), None)
    by_worth = sorted(releases, key=lambda r: (r == current, r == back, r.is_good, r.age), reverse=True)
    found = []
    for place, release in enumerate(by_worth):
        container = used.get(release.tag)
        protection = protections.get(release.tag)
        reasons = (
            "current" if release == current else "",
            "passed last" if release == passed_last else "",
            protection.text if protection else "",
            f"in use by the container {container}" if container else "",
            f"one of the {keep} to keep" if place < keep else "",
            "to roll back to" if release == back and (place < keep or release.tag in before) else "",
        )
        found.append(Verdict(release, tuple(filter(None, reasons))))
    return found
