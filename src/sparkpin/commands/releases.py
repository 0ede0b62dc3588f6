"""`invoke images`, `promote`, `rollback`, `keep`, `prune`."""

from __future__ import annotations

import json
import shlex
import time

from sparkpin.build.make import engine_of
from sparkpin.commands import tables
from sparkpin.commands.choose import choose_recipe, require_recipe
from sparkpin.commands.notes import next_serve
from sparkpin.commands.serve import serve
from sparkpin.core import terminal
from sparkpin.core.errors import (
    SparkpinError,
)
from sparkpin.core.paths import Paths
from sparkpin.core.progress import waiting
from sparkpin.core.terminal import say, show
from sparkpin.history.prune import plan as pruning
from sparkpin.releases import current as retention
from sparkpin.releases import keep as pinned
from sparkpin.releases import quality_gate
from sparkpin.releases.record import Release, Releases
from sparkpin.serve.served import running_release
from sparkpin.smoke.server import clear_leftovers, leftovers


def images(*, as_json: bool) -> None:
    """What can be read of the releases; then ManifestError for a record that is damaged."""
    paths = Paths.from_env()
    with waiting(say, "asking the engine for its images"):
        rows, shared = retention.rows(paths, engine_of(paths))
    if as_json:
        show(json.dumps(rows, indent=2, sort_keys=True))
    elif rows:
        tables.show_images(rows, shared)
    else:
        show("no release yet; next: invoke up")
    faults = Releases(paths).faults()
    for fault in faults[1:]:
        say(f"damaged, too: {fault}")
    if faults:
        raise faults[0]


def promote(tag: str, *, accept_loss: str = "") -> None:
    """accept_loss: why a greater loss of quality than the stage allows is taken; it is kept with the release."""
    paths = Paths.from_env()
    accept_loss = accept_loss.strip()  # blanks are no reason
    told = quality_gate.check(paths, Releases(paths).get(tag), accepted=accept_loss)
    release = retention.promote(paths, engine_of(paths), tag)
    show(f"current release of {release.recipe}: {release.tag}")
    for line in told:
        show(line)
    if accept_loss:
        quality_gate.note_accepted(paths, release, accept_loss)
    next_serve(paths, release)


def rollback(*, recipe: str | None, serve_it: bool = False, drain: int | None = None) -> None:
    """serve_it: serve what came back, too; where it does not become ready, nothing has changed."""
    paths = Paths.from_env()
    name = choose_recipe(paths, recipe, None)
    records = Releases(paths)
    for fault in require_recipe(paths, records, name):
        say(f"passed over: {fault}")
    former = retention.require_current(records, name)
    engine = engine_of(paths)
    running = running_release(paths, engine, name)
    release = retention.rollback(paths, engine, name, say)
    for line in went_back(former, release, running):
        show(line)
    if not serve_it:
        next_serve(paths, release)
        return
    try:
        serve(recipe=name, release=release.tag, port=None, drain=drain)
    except SparkpinError:
        retention.promote(paths, engine, former.tag)
        show(f"current again, since {release.tag} could not be served: {former.tag}")
        raise


def went_back(former: Release, release: Release, running: str | None) -> list[str]:
    """What a rollback did. running: tag of what was served, which need not be what was current."""
    lines = [
        f"back from {former.tag}",
        f"to {release.tag}: image {terminal.digest(release.image)}, checkpoint {release.checkpoint_key[:12]}",
        *changed_flags(former.argv, release.argv),
    ]
    if running not in (None, former.tag, release.tag):
        lines.append(
            f"note: {running} was served, and {former.tag} was current, which rollback goes by; if that was meant to "
            f"come back: invoke promote {former.tag}, then invoke serve --release {former.tag}"
        )
    return lines


def changed_flags(before: tuple[str, ...], after: tuple[str, ...]) -> list[str]:
    """One line for each flag, with its values, that went or came."""
    old, new = flags(before), flags(after)
    if old == new:
        return ["flags: the same"]
    return [f"  - {flag}" for flag in old if flag not in new] + [f"  + {flag}" for flag in new if flag not in old]


def flags(argv: tuple[str, ...]) -> list[str]:
    """Each flag with the words that follow it."""
    starts = [place for place, word in enumerate(argv) if word.startswith("--")]
    ends = [*starts[1:], len(argv)]
    return [shlex.join(argv[start:end]) for start, end in zip(starts, ends, strict=True)]


def pin(tag: str, *, note: str) -> None:
    release, made = pinned.pin(Releases(Paths.from_env()), tag, note)
    show(f"{release.tag} is {made.text}")
    show(f"no prune removes it until: invoke unpin {release.tag}")


def unpin(tag: str) -> None:
    records = Releases(Paths.from_env())
    was_pinned = pinned.unpin(records, tag)
    show(f"{records.get(tag).tag} is {'no longer' if was_pinned else 'not'} pinned")


def prune(*, keep: int, dry_run: bool, store: bool) -> None:
    paths = Paths.from_env()
    engine = engine_of(paths)
    if dry_run:
        ignored = leftovers(paths, engine)
    else:
        clear_leftovers(paths, engine, say)
        ignored = frozenset()
    now = time.time()
    done = pruning.prune(paths, engine, keep, say, now=now, dry_run=dry_run, store=store, ignored=ignored)
    tables.show_prune(done, dry_run=dry_run, store=store)
