"""What a command prints besides its result: what was overruled, what is wrong, what to type next."""

from __future__ import annotations

from sparkpin.build.consistent import require_consistent
from sparkpin.build.pair import Pairing, require_model_fits
from sparkpin.cli.releases import tables
from sparkpin.core import terminal
from sparkpin.core.errors import InputError, SmokeError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say, show
from sparkpin.host.engine import Engine
from sparkpin.pins.mods import templates_of
from sparkpin.pins.vllm_command import overruled
from sparkpin.releases.current import how_it_failed, not_passed
from sparkpin.releases.record import Release, Releases
from sparkpin.releases.runs_here import obstacle, with_others


def notes_of(paths: Paths, pairing: Pairing) -> list[str]:
    """What is said before images and checkpoints are made: what vLLM will refuse, for one, of what is not built yet."""
    recipe = pairing.recipe
    notes = [f"note: {line}" for line in overruled(recipe, pairing.stack, pairing.chain)]
    if not Releases(paths).find(pairing.tag):
        from sparkpin.recipes import check  # slow to import, and a build may find all there

        mistakes = check.mistakes(paths.project, recipe, pairing.stack, pairing.chain)
        notes += [f"warning: {recipe.file}: {str(one).removeprefix('error: ')}" for one in mistakes]
    notes += [choice.line for choice in pairing.chosen]
    notes += [f"note: {line}" for line in require_model_fits(paths, pairing)]
    for mod, template in templates_of(paths.project, recipe.mods).items():
        from sparkpin.recipes.adopt import about

        notes.append(f"note: {about(mod, template)}")
    return notes


def how_to_carry(records: Releases, release: Release) -> str:
    """To a machine that can run it. An inspection makes no checkpoint, and a bundle needs one."""
    step = f"invoke export {release.tag} {release.name}.tar, and there invoke import and invoke smoke"
    make = f"invoke reproduce {release.tag} --keep (makes its checkpoint), then "
    return ("" if records.checkpoint(release).is_dir() else make) + (with_others(records.paths, release) or step)


def require_runnable(paths: Paths, engine: Engine, release: Release, *, to_serve: bool = False) -> None:
    """InputError where no server of a release can run here, or where one that has not passed is to be served, for which
    this is one of its machines. What is not its record's is refused."""
    if why := obstacle(paths, engine, release, nodes=1 if to_serve else None):
        step = f"where it can run: {how_to_carry(Releases(paths), release)}"
        raise InputError(f"{release.tag} cannot be served here: {why}", next_step=step)
    if to_serve and not release.is_good:
        raise not_passed(paths, release)
    if not release.smoke_passed:
        say(f"warning: {release.tag} is {release.state}: no smoke test stands behind its answers")
    require_consistent(paths, release)


def report(paths: Paths, releases: tuple[Release, ...], *, smoked: bool = True, serves: bool = False) -> None:
    """Print releases, and what to type next. smoked: these were to be tested, so that one that failed is the task's
    failure; serves: what is current is served next."""
    rows = []
    for r in releases:
        seconds, verdict = terminal.seconds(r.build_seconds), r.smoke_text.partition(":")[0]
        rows.append((terminal.digest(r.image), terminal.size(r.size), seconds, verdict))
    tables(("release", "image", "size", "build", "smoke"), [r.tag for r in releases], rows)
    records, newest, failed = Releases(paths), releases[-1], [release for release in releases if release.smoke_failed]
    if failed and smoked:
        for release in failed:
            for failure in release.smoke_failures:
                show(f"{release.tag}: {failure.splitlines()[0]}")  # the test itself has printed all of it
        cause = f"{len(failed)} of {len(releases)} smoke tests failed; their images are kept"
        raise SmokeError(cause, next_step=how_it_failed(paths, failed[0]))
    serve_it = f"invoke serve --recipe {newest.recipe}"
    if waiting := sum(release.state == "built" for release in releases):
        show(f"next: invoke smoke ({waiting} of these not yet smoked)")
    elif newest.smoke_inspected:
        show(f"next, where it can run: {how_to_carry(records, newest)}")
    elif newest.smoke_passed and newest.tag != records.current_tag(newest.recipe):
        show(f"next: invoke promote {newest.tag}, then {serve_it}")
    elif newest.smoke_passed and not serves:
        show(f"next: {serve_it}")
