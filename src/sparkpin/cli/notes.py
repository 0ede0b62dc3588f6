"""What a command prints besides its result: what was overruled, what is wrong, what to type next."""

from __future__ import annotations

from sparkpin.build.pair import Pairing, require_model_fits
from sparkpin.core.errors import SmokeError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import show
from sparkpin.pins.mods import templates_of
from sparkpin.pins.vllm_command import overruled
from sparkpin.releases.record import Release, Releases
from sparkpin.releases.runs_here import with_others


def notes_of(paths: Paths, pairing: Pairing) -> tuple[str, ...]:
    """What is said before images and checkpoints are made: what vLLM will refuse, for one, of what is not built yet."""
    recipe, mistakes = f"recipes/{pairing.recipe.name}.yaml", list[str]()
    if not Releases(paths).find(pairing.tag):
        from sparkpin.recipes import check  # slow to import, and a build may find all there

        mistakes = [str(finding).removeprefix("error: ") for finding in check.mistakes(paths.project, pairing)]
    templates = templates_of(paths.project, pairing.recipe.mods).items()
    if templates:
        from sparkpin.recipes.adopt import about
    return (
        *(f"note: {line}" for line in overruled(pairing.recipe, pairing.stack, pairing.chain)),
        *(f"warning: {recipe}: {mistake}" for mistake in mistakes),
        *(choice.line for choice in pairing.chosen),
        *(f"note: {line}" for line in require_model_fits(paths, pairing)),
        *(f"note: {about(mod, template)}" for mod, template in templates),
    )


def how_to_carry(records: Releases, release: Release) -> str:
    """To a machine that can run it. An inspection makes no checkpoint, and a bundle needs one."""
    step = f"invoke export {release.tag} {release.name}.tar, and there invoke import and invoke smoke"
    make = f"invoke reproduce {release.tag} --keep (makes its checkpoint), then "
    return ("" if records.checkpoint(release).is_dir() else make) + (with_others(records.paths, release) or step)


def finish(records: Releases, made: tuple[Release, ...], *, smoked: bool = True, serves: bool = False) -> None:
    """Print what to type next. smoked: these were to be tested, so that one that failed is the task's failure; serves:
    what is current is served next."""
    failed = [release for release in made if release.smoke_failed]
    if failed and smoked:
        for release in failed:
            for failure in release.smoke_failures:
                show(f"{release.tag}: {failure}")
        step = f"invoke smoke {failed[0].tag} repeats it; what it left: {records.evidence(failed[0])}/smoke"
        raise SmokeError(f"{len(failed)} of {len(made)} smoke tests failed; their images are kept", next_step=step)
    newest = made[-1]
    if waiting := sum(release.state == "built" for release in made):
        show(f"next: invoke smoke ({waiting} of these not yet smoked)")
    elif newest.smoke_inspected:
        show(f"next, where it can run: {how_to_carry(records, newest)}")
    elif newest.smoke_passed:
        is_current = newest.tag == records.current_tag(newest.recipe)
        serve_it = f"invoke serve --recipe {newest.recipe}"
        if not (is_current and serves):
            show(f"next: {serve_it}" if is_current else f"next: invoke promote {newest.tag}, then {serve_it}")
