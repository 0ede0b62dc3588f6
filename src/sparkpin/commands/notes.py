"""What a command says beside its result: what was overruled, what is wrong, what to type next."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from sparkpin.build.make import engine_of
from sparkpin.build.pair import Pairing
from sparkpin.commands.choose import choose_recipe
from sparkpin.community import check as recipe_checks
from sparkpin.core.errors import (
    SmokeError,
    SparkpinError,
)
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say, show
from sparkpin.host import machine as host
from sparkpin.pins import manifests, schema
from sparkpin.pins.precedence import overruled
from sparkpin.releases.kept_inputs import project_of
from sparkpin.releases.record import Release, Releases
from sparkpin.serve.served import running_release
from sparkpin.smoke.choice import obstacle


def say_overruled(recipe: schema.Recipe, stack: schema.Stack, chain: Sequence[schema.Stage]) -> None:
    for line in overruled(recipe, stack, chain):
        say(f"note: {line}")


def say_mistakes(paths: Paths, pairing: Pairing) -> None:
    """What vLLM will refuse, before images and checkpoints are made for it."""
    for finding in recipe_checks.mistakes(paths.project, pairing):
        say(f"warning: recipes/{pairing.recipe.name}.yaml: {str(finding).removeprefix('error: ')}")


def say_chosen(pairing: Pairing) -> None:
    for choice in pairing.chosen:
        say(choice.line)
    if pairing.patched:
        say(f"note: community mods edit what is installed, in layers of their own: {', '.join(pairing.patched)}")


def say_overruled_of(paths: Paths, release: Release) -> None:
    """Of the files that a release was made from; nothing where they are not kept: serving needs none of them."""
    with contextlib.suppress(SparkpinError), project_of(paths, release) as project:
        recipe = manifests.load_recipe(project, release.recipe)
        stack, chain = manifests.load_stack(project, recipe.stack), manifests.load_chain(project, release.stage)
        say_overruled(recipe, stack, chain)


def next_smoke(paths: Paths, made: tuple[Release, ...]) -> bool:
    """Say that releases of a recipe wait for their smoke test; False when none does."""
    waiting = [release for release in made if release.state == "built"]
    if waiting:
        last = waiting[-1]
        of = "" if last.recipe == choose_recipe(paths, None, None) else f" --recipe {last.recipe}"
        load = " --load" if (why := obstacle(paths, engine_of(paths), last)) else ""
        here = f"; here they can only be inspected: {why}" if why else ""
        show(f"next: invoke smoke{of}{load} ({len(waiting)} of these not yet smoked{here})")
    return bool(waiting)


def how_to_carry(records: Releases, release: Release) -> str:
    """To a machine that can run it. An inspection makes no checkpoint, and a bundle wants one."""
    first = (
        "" if records.checkpoint(release).is_dir() else f"invoke rebuild {release.tag} (makes its checkpoint), then "
    )
    return f"{first}invoke export {release.tag} -o {release.name}.tar, and there invoke import and invoke smoke"


def finish(records: Releases, done: tuple[Release, ...]) -> None:
    """Say what to type next; a failed smoke test is the task's failure."""
    failed = [release for release in done if release.smoke_failed]
    for release in failed:
        for failure in release.smoke_failures:
            show(f"{release.tag}: {failure}")
    if failed:
        raise SmokeError(
            f"{len(failed)} of {len(done)} smoke tests failed; their images are kept, marked failed",
            next_step=f"read {records.evidence(failed[0])}/smoke/{failed[0].smoke_log}",
        )
    if done:
        newest = done[-1]
        if not newest.smoke_passed:
            show(f"next, where it can run: {how_to_carry(records, newest)}")
            return
        is_current = newest.tag == records.current_tag(newest.recipe)
        serve_it = host.serve_command(records.paths.project, newest.recipe)
        show(f"next: {serve_it}" if is_current else f"next: invoke promote {newest.tag}, then {serve_it}")


def next_serve(paths: Paths, release: Release) -> None:
    """What answers now goes on answering until `serve` changes it."""
    running = running_release(paths, engine_of(paths), release.recipe)
    if running == release.tag:
        show("it is being served already")
    else:
        until = f" (until then {running} still answers)" if running else ""
        show(f"next: {host.serve_command(paths.project, release.recipe)}{until}")
