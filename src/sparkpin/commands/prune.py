"""`invoke prune`."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from sparkpin.commands.tables import tables
from sparkpin.core import terminal
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say
from sparkpin.history.prune import plan as pruning
from sparkpin.host.engine import engine_of
from sparkpin.smoke.server import clear_leftovers, leftovers

WHY = {
    pruning.IMAGES: "in none of the images that stay",
    pruning.VOLUMES: "of an image that the engine no longer has",
    pruning.STORE: "no lock and no release that stays needs it",
    pruning.BUILD_CACHE: "of everybody's builds on this engine, which does not tell whose a record is",
    pruning.RECORDS: "the releases above",
    "checkpoints": "no release that stays is served with it",
    "evidence": "of the releases above",
    "layer contents": "listings of layers that no release or image has",
    "layer notes": "of layers that no image of the engine has",
    "root file systems": "no stack, record or image stands on it",
    "kept inputs": "no release that stays was made from it",
    "quality measurements": "of releases that are gone",
    "searches of bisect": "a release of theirs is gone, or going",
    "left by killed runs": "not touched for an hour",
    "build records": "no release that stays stands on its image",
}
HASH, SHORT = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{52}\b"), r"\1"
NAMED = {"checkpoints", "layer notes", "layer contents", "root file systems", "left by killed runs", "build records"}
NAMED |= {"quality measurements", "searches of bisect"}


def prune(*, keep: int, dry_run: bool, store: bool, build_cache: bool = False) -> None:
    paths = Paths.from_env()
    engine = engine_of(paths)
    if dry_run:
        ignored = leftovers(paths, engine)
    else:
        clear_leftovers(paths, engine, say)
        ignored = frozenset()
    now = time.time()
    done = pruning.prune(
        paths, engine, keep, say, now=now, dry_run=dry_run, store=store, build_cache=build_cache, ignored=ignored
    )
    show_prune(done, dry_run=dry_run, store=store)


def show_prune(done: pruning.Pruned, *, dry_run: bool, store: bool) -> None:
    tables(
        ("release", "state", "", "why"),
        [v.release.tag for v in done.verdicts],
        [
            (v.release.state_text, "stays" if v.reasons else "goes" if dry_run else "gone", ", ".join(v.reasons))
            for v in done.verdicts
        ],
    )
    if done.counts:
        freed = [(kind, count, terminal.size(done.bytes[kind]), WHY[kind]) for kind, count in done.counts.items()]
        terminal.table(("what goes" if dry_run else "what went", "count", "freed", "why"), freed)
    for tag in done.images:
        terminal.show(f"{tag}: no release that stays stands on it")
    for volume in done.volumes:
        terminal.show(f"volume {volume}")
    for line in named_files(done.files):
        terminal.show(line)
    would = "would remove" if dry_run else "removed"
    terminal.show(
        f"{would} {terminal.count(len(done.tags), 'release')}, free{'' if dry_run else 'd'} {terminal.size(done.total)}"
    )
    if done.held:
        terminal.show(
            f"{terminal.size(done.held)} more when the engine's build cache lets go of layers that builds stood on: "
            "--build-cache"
        )
    if done.cache and done.cache.records:
        terminal.show(
            f"the engine's build cache, which stays, takes {terminal.size(done.cache.bytes)} besides: --build-cache "
            "frees it, of everybody's builds, for the engine does not tell whose a record is"
        )
    if done.unmeasured:
        terminal.show(f"not counted: {terminal.count(done.unmeasured, 'cache volume')} that only root can measure")
    if done.unsized:
        terminal.show(
            f"not counted: layers of {terminal.count(done.unsized, 'image')} whose sizes the engine does not tell"
        )
    if store and done.store_bytes is None:
        terminal.show(
            "the store stays: a remaining release's build record cannot be read, so what it needs is not known"
        )
    if done.store_bytes and not store:
        size = terminal.size(done.store_bytes)
        terminal.show(f"--store would free {size} more: fetched files that no lock and no release needs")
    if dry_run:
        terminal.show("Dry run: nothing was changed.")


def named_files(files: Mapping[str, Sequence[Path]]) -> Iterator[str]:
    """Each file by its name, in the order of the table; those of a store have hashes for names and are only counted."""
    for kind, paths in files.items():
        for folder in dict.fromkeys(path.parent for path in paths) if kind in NAMED else ():
            names = ", ".join(path.name for path in paths if path.parent == folder)
            yield f"{kind} of {folder}: {terminal.printable(HASH.sub(SHORT, names))}"
