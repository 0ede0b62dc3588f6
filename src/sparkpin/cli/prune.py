"""`invoke prune`."""

from __future__ import annotations

import time
from typing import Annotated

from sparkpin.cli.options import DryRun
from sparkpin.cli.tables import tables
from sparkpin.cli.tasks import task
from sparkpin.core import terminal
from sparkpin.core.paths import Paths
from sparkpin.host.engine import engine_of
from sparkpin.prune import plan as pruning
from sparkpin.smoke.server import clear_leftovers, leftovers


@task("releases")
def prune(
    *,
    keep: Annotated[
        int, "releases to keep per recipe (default: 5); current, previous, kept and in-use ones always stay", "COUNT"
    ] = 5,
    dry_run: DryRun = False,
    store: Annotated[bool, "also remove fetched files that no lock and no remaining release needs"] = False,
) -> None:
    """Remove old releases, and what only they needed."""
    paths = Paths.from_env()
    engine = engine_of(paths)
    ignored = leftovers(paths, engine) if dry_run else frozenset[str]()
    if not dry_run:
        clear_leftovers(paths, engine)
    options = pruning.PruneOptions(keep=keep, now=time.time(), dry_run=dry_run, store=store, ignored=ignored)
    show_prune(pruning.prune(paths, engine, options), options)


def show_prune(done: pruning.Pruned, options: pruning.PruneOptions) -> None:
    gone, removed = ("goes", "would remove") if options.dry_run else ("gone", "removed")
    tables(
        ("release", "state", "", "why"),
        [v.release.tag for v in done.verdicts],
        [(v.release.state_text, "stays" if v.reasons else gone, ", ".join(v.reasons)) for v in done.verdicts],
    )
    releases = {release.tag for release in done.removed}
    for kind, names in (("image", sorted({*done.tags} - releases)), ("cache volume", done.volumes)):
        for name in names:
            terminal.show(f"{removed} {kind} {terminal.printable(name)}")
    for kind, files in done.files.items():
        folders = sorted({str(path.parent) for path in files})
        where = folders[0] if len(folders) == 1 else f"{len(folders)} folders"
        terminal.show(f"{removed} {kind}: {len(files)} ({where})")
    terminal.show(f"{removed} {terminal.count(len(releases), 'release')}")
    if options.dry_run:
        terminal.show("Dry run: nothing was changed.")
