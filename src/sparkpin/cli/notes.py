"""What a command prints besides its result: what was overruled, what is wrong, what to type next."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from sparkpin.build.pair import Pairing, require_model_fits
from sparkpin.cli.choose import choose_recipe
from sparkpin.core.errors import SmokeError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say, show
from sparkpin.host import machine
from sparkpin.host.engine import engine_of
from sparkpin.pins import manifests, schema
from sparkpin.pins.mods import templates_of
from sparkpin.pins.vllm_command import overruled, serve_argv
from sparkpin.releases.kept_inputs import project_of
from sparkpin.releases.record import Release, Releases
from sparkpin.releases.runs_here import obstacle, with_others


def notes_of(paths: Paths, pairing: Pairing) -> tuple[str, ...]:
    """What is said before images and checkpoints are made: what vLLM will refuse, for one, of what is not built yet."""
    recipe, mistakes = f"recipes/{pairing.recipe.name}.yaml", list[str]()
    if not Releases(paths).find(pairing.tag):
        from sparkpin.recipes import check  # slow to import, and a build may find all there

        mistakes = [str(finding).removeprefix("error: ") for finding in check.mistakes(paths.project, pairing)]
    templates = templates_of(paths.project, pairing.recipe.mods).items()
    if templates:
        from sparkpin.recipes.mapping import about
    return (
        *overruled_notes(pairing.recipe, pairing.stack, pairing.chain),
        *(f"warning: {recipe}: {mistake}" for mistake in mistakes),
        *(choice.line for choice in pairing.chosen),
        *(f"note: {line}" for line in require_model_fits(paths, pairing)),
        *(f"note: {about(mod, template)}" for mod, template in templates),
    )


def overruled_notes(recipe: schema.Recipe, stack: schema.Stack, chain: Sequence[schema.Stage]) -> list[str]:
    return [f"note: {line}" for line in overruled(recipe, stack, chain)]


def say_memory_issues(recipe_name: str | None, stage: str | None, stack_name: str | None) -> None:
    """What has broken for others with the memory that the server of a recipe, else of the stack's, asks for."""
    from sparkpin.recipes import known_issues  # slow to import
    from sparkpin.recipes.flags import PlannedServer
    from sparkpin.recipes.vllm_parser import parser_of

    project = Paths.from_env().project
    recipe = manifests.load_recipe(project, recipe_name or machine.default_recipe(project, stack_name))
    stack, chain = manifests.load_stack(project, recipe.stack), manifests.load_chain(project, stage or recipe.stage)
    argv, env = serve_argv(recipe, stack, chain)
    vllm, gpu = parser_of(stack.vllm), stack.gpu is not None
    served = PlannedServer(recipe.model, tuple(argv), env, vllm, gpu, None, frozenset(), chain)
    issues = [issue for issue in manifests.load_known_issues(project) if issue.memory]
    for finding in known_issues.known(served, issues):
        say(str(finding))


def say_overruled_of(paths: Paths, release: Release) -> None:
    """Of the files that a release was made from; nothing where they are not kept: serving needs none of them."""
    with contextlib.suppress(SparkpinError), project_of(paths, release) as project:
        recipe = manifests.load_recipe(project, release.recipe)
        stack, chain = manifests.load_stack(project, recipe.stack), manifests.load_chain(project, release.stage)
        for line in overruled_notes(recipe, stack, chain):
            say(line)


def next_smoke(paths: Paths, made: tuple[Release, ...]) -> bool:
    """Say that releases of a recipe wait for their smoke test; False when none does."""
    waiting = [release for release in made if release.state == "built"]
    if waiting:
        last = waiting[-1]
        of = "" if last.recipe == choose_recipe(paths, None, None) else f" --recipe {last.recipe}"
        if step := with_others(paths, last):
            show(f"next: {step} ({len(waiting)} of these not yet smoked)")
            return True
        load = " --load" if (why := obstacle(paths, engine_of(paths), last)) else ""
        here = f"; here they can only be inspected: {why}" if why else ""
        show(f"next: invoke smoke{of}{load} ({len(waiting)} of these not yet smoked{here})")
    return bool(waiting)


def how_to_carry(records: Releases, release: Release) -> str:
    """To a machine that can run it. An inspection makes no checkpoint, and a bundle wants one."""
    make = f"invoke reproduce {release.tag} --keep (makes its checkpoint), then "
    first = "" if records.checkpoint(release).is_dir() else make
    if step := with_others(records.paths, release):
        return f"{first}{step}"
    return f"{first}invoke export {release.tag} {release.name}.tar, and there invoke import and invoke smoke"


def finish(records: Releases, done: tuple[Release, ...], *, serves: bool = False) -> None:
    """Say what to type next; a failed smoke test is the task's failure. serves: what is current is served next."""
    failed = [release for release in done if release.smoke_failed]
    for release in failed:
        for failure in release.smoke_failures:
            show(f"{release.tag}: {failure}")
    if failed:
        raise SmokeError(
            f"{len(failed)} of {len(done)} smoke tests failed; their images are kept, marked failed",
            next_step=f"invoke smoke {failed[0].tag} repeats it; requests, answers and the log lie beside "
            f"{records.evidence(failed[0])}/smoke/{failed[0].smoke_log}",
        )
    if done:
        newest = done[-1]
        if not newest.smoke_passed:
            show(f"next, where it can run: {how_to_carry(records, newest)}")
            return
        is_current = newest.tag == records.current_tag(newest.recipe)
        serve_it = machine.serve_command(records.paths.project, newest.recipe)
        if not (is_current and serves):
            show(f"next: {serve_it}" if is_current else f"next: invoke promote {newest.tag}, then {serve_it}")
