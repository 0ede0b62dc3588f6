"""`invoke smoke`."""

from __future__ import annotations

from collections.abc import Sequence

from sparkpin.build.make import smoke_releases
from sparkpin.commands import tables
from sparkpin.commands.choose import choose_recipe, newest_of_stage, require_recipe
from sparkpin.commands.notes import finish
from sparkpin.core import terminal
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say, show
from sparkpin.host.engine import engine_of
from sparkpin.releases.record import Release, Releases
from sparkpin.smoke import drift
from sparkpin.smoke.evidence import owes


def waiting_for_smoke(paths: Paths, made: Sequence[Release], *, load: bool = False) -> tuple[Release, ...]:
    """Those that no smoke test has told what it could here, and those that failed."""
    if all(release.smoke_passed for release in made):
        return ()
    engine = engine_of(paths)
    return tuple(r for r in made if r.smoke_failed or owes(paths, engine, r, load=load))


def smoke(*, tag: str | None, stage: str | None, recipe: str | None, load: bool) -> tuple[Release, ...]:
    paths = Paths.from_env()
    records = Releases(paths)
    if recipe:
        require_recipe(paths, records, recipe)
    if tag:
        wanted = [records.get(tag)]
    elif stage:
        wanted = [newest_of_stage(paths, choose_recipe(paths, recipe, None), stage)]
    else:
        known = [release for release in records.all() if recipe in (None, release.recipe)]
        fresh = [release for release in known if release.state in ("built", "inspected")]
        waiting = waiting_for_smoke(paths, fresh, load=load)
        wanted = with_image(paths, waiting)
        if not wanted:
            show(nothing_to_smoke(recipe, known=len(known), left_out=len(waiting)))
            for release in known:
                if release.smoke_failed:
                    show(f"{release.tag} failed: {'; '.join(release.smoke_failures)}")
                    show(f"next: invoke smoke {release.tag}")
            return ()
    done = smoke_releases(paths, tuple(wanted), load=load)
    complete_above(paths, done)
    done = tuple(records.get(one.tag) for one in done)
    tables.show_built(done)
    finish(records, done)
    return done


def complete_above(paths: Paths, done: Sequence[Release]) -> None:
    """The check `drift` of releases that had nothing to compare with, where one of `done` is what they were built on:
    an older release is not judged by another build of the stage below."""
    records = Releases(paths)
    for recipe in sorted({release.recipe for release in done}):
        for other in records.readable(recipe)[0]:
            below = any(other.diff_ids[: len(one.diff_ids)] == one.diff_ids for one in done)
            if below and other.smoke_passed and not drift.is_compared(other):
                drift.complete(paths, other, say)


def nothing_to_smoke(recipe: str | None, *, known: int, left_out: int) -> str:
    """known: releases there are; left_out: those that wait for their smoke test and have no image."""
    of = f" of {recipe}" if recipe else ""
    if left_out:
        return f"nothing smoked: {terminal.count(left_out, 'release')}{of} not yet smoked, none of them with an image"
    if not known:
        return f"nothing to smoke: no release{of} is built; next: invoke build{f' --recipe {recipe}' if recipe else ''}"
    return f"nothing to smoke: every release{of} has been smoked (invoke smoke TAG repeats one)"


def with_image(paths: Paths, waiting: Sequence[Release]) -> list[Release]:
    """Those whose image the engine has: nobody asked for the others by name, so they do not stop the rest."""
    if not waiting:
        return []
    engine = engine_of(paths)
    there = [release for release in waiting if engine.image(release.tag)]
    gone = [release.tag for release in waiting if release not in there]
    if gone:
        show(f"left out, the engine has not {tables.images_gone(gone)}")
    return there
