"""`invoke prune`."""

from __future__ import annotations

import time
from typing import Annotated

from sparkpin.cli.tables import tables
from sparkpin.cli.tasks import task
from sparkpin.core import terminal
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say
from sparkpin.host.disk_usage import clear_build_cache
from sparkpin.host.engine import engine_of
from sparkpin.prune import plan as pruning
from sparkpin.smoke.server import clear_leftovers, leftovers


@task("releases")
def prune(
    *,
    keep: Annotated[
        int, "releases to keep per recipe (default: 5); current, previous, kept and in-use ones always stay", "COUNT"
    ] = 5,
    dry_run: Annotated[bool, "print what would be removed, and change nothing"] = False,
    store: Annotated[bool, "also remove fetched files that no lock and no remaining release needs"] = False,
    build_cache: Annotated[
        bool, "also clear the engine's build cache, including that of other projects' builds"
    ] = False,
) -> None:
    """Remove old releases, and what only they needed."""
    paths = Paths.from_env()
    engine = engine_of(paths)
    ignored = leftovers(paths, engine) if dry_run else frozenset[str]()
    if not dry_run:
        clear_leftovers(paths, engine, say)
    done = pruning.prune(paths, engine, keep, say, now=time.time(), dry_run=dry_run, store=store, ignored=ignored)
    show_prune(done, dry_run=dry_run)
    if build_cache and dry_run:
        terminal.show("the engine's build cache would be cleared")
    elif build_cache:
        records, size = clear_build_cache(engine)
        terminal.show(f"the engine's build cache: removed {terminal.count(records, 'record')}, {terminal.size(size)}")


def show_prune(done: pruning.Pruned, *, dry_run: bool) -> None:
    tables(
        ("release", "state", "", "why"),
        [v.release.tag for v in done.verdicts],
        [
            (v.release.state_text, "stays" if v.reasons else "goes" if dry_run else "gone", ", ".join(v.reasons))
            for v in done.verdicts
        ],
    )
    would = "would remove" if dry_run else "removed"
    for kind, names in (("image", done.images), ("cache volume", done.volumes)):
        for name in names:
            terminal.show(f"{would} {kind} {terminal.printable(name)}")
    for kind, files in done.files.items():
        folders = sorted({str(path.parent) for path in files})
        where = folders[0] if len(folders) == 1 else f"{len(folders)} folders"
        terminal.show(f"{would} {kind}: {len(files)} ({where})")
    terminal.show(f"{would} {terminal.count(len(done.tags), 'release')}")
    if done.store is None:
        terminal.show("the store stays: what it is needed for cannot be read")
    elif done.store:
        terminal.show(f"--store removes {terminal.count(done.store, 'fetched file')} more that nothing needs")
    if dry_run:
        terminal.show("Dry run: nothing was changed.")
