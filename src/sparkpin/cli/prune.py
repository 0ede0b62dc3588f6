"""`invoke prune`."""

from __future__ import annotations

import time
from typing import Annotated

from sparkpin.cli.tables import tables
from sparkpin.cli.tasks import DryRun, task
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import count, printable, show
from sparkpin.host.engine import engine_of
from sparkpin.prune import plan as pruning
from sparkpin.smoke.server import clear_leftovers, leftovers


@task("releases")
def prune(
    paths: Paths,
    *,
    keep: Annotated[int, "how many of a recipe stay (default: 5) besides current, previous, kept and used ones"] = 5,
    dry_run: DryRun = False,
    store: Annotated[bool, "also remove fetched files that no lock and no remaining release needs"] = False,
) -> None:
    """Remove old releases, and what only they needed."""
    engine = engine_of(paths)
    ignored = leftovers(paths, engine) if dry_run else frozenset[str]()
    if not dry_run:
        clear_leftovers(paths, engine)
    options = pruning.PruneOptions(keep=keep, now=time.time(), dry_run=dry_run, store=store, ignored=ignored)
    done = pruning.prune(paths, engine, options)
    gone, removed = ("goes", "would remove") if dry_run else ("gone", "removed")
    rows = [(v.release.state_text, "stays" if v.reasons else gone, ", ".join(v.reasons)) for v in done.verdicts]
    tables(("release", "state", "", "why"), [v.release.tag for v in done.verdicts], rows)
    releases = {release.tag for release in done.removed}
    for kind, names in (("image", sorted({*done.tags} - releases)), ("cache volume", done.volumes)):
        for name in names:
            show(f"{removed} {kind} {printable(name)}")
    for kind, files in done.files.items():
        folders = sorted({str(path.parent) for path in files})
        show(f"{removed} {kind}: {len(files)} ({folders[0] if len(folders) == 1 else f'{len(folders)} folders'})")
    show(f"{removed} {count(len(releases), 'release')}")
    if dry_run:
        show("Dry run: nothing was changed.")
