"""`invoke images`, `promote`, `rollback`, `keep`."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from sparkpin.cli import tables
from sparkpin.cli.tasks import Json, KnownRecipe, task
from sparkpin.core import terminal
from sparkpin.core.errors import InputError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say, show, show_json
from sparkpin.host.engine import Engine, engine_of
from sparkpin.releases import current
from sparkpin.releases.protection import protect, unprotect
from sparkpin.releases.record import Release, Releases
from sparkpin.serve.served import running_release


@task("releases")
def images(paths: Paths, *, json: Json = False) -> None:
    """List the releases with their images."""
    found = current.list_images(paths, engine_of(paths))
    if json:
        show_json(found.rows)
    elif found.rows:
        tables.show_images(found.rows, found.shared)
    else:
        show("no release yet; next: invoke up")
    for fault in found.faults[1:]:
        say(f"damaged, too: {fault}")
    if found.faults:
        raise found.faults[0]


@task("releases")
def promote(
    paths: Paths,
    tag: Annotated[str, "release that passed its smoke test"],
    *,
    recipe: KnownRecipe = None,
    accept_loss: Annotated[str, "why it may lose more quality than its stage allows; recorded with it", "WHY"] = "",
    deep: Annotated[bool, "hash its whole checkpoint, not only small files and those whose time has changed"] = False,
) -> None:
    """Make a release the current one of its recipe.

    invoke promote v2-tq
    """
    from sparkpin.releases import quality_gate  # slow to import, and `images` is asked for often

    accept_loss = accept_loss.strip()  # blanks are no reason
    release = Releases(paths).get(tag, recipe)
    found = quality_gate.check(paths, release, accepted=accept_loss)
    engine = engine_of(paths)
    if release.is_good:
        require_as_recorded(paths, release, deep=deep)
    accepted = dict.fromkeys(found.lost, accept_loss) if accept_loss else None
    release = current.promote(paths, engine, release, accepted=accepted)
    show("\n".join([f"current release of {release.recipe}: {release.tag}", *found.notes]))
    next_serve(paths, engine, release)


def require_as_recorded(paths: Paths, release: Release, *, deep: bool = False) -> None:
    """Raises where a release is not what its record says, here or on the machines that its recipe is served on."""
    from sparkpin.build.consistent import require_consistent  # slow to import, both
    from sparkpin.serve import linked

    linked.require_there(paths, release)
    require_consistent(paths, release, finished=True, hashing=lambda file: say(f"hashing {file}"), deep=deep)


def next_serve(paths: Paths, engine: Engine, release: Release) -> None:
    """What answers now goes on answering until `serve` changes it."""
    running = running_release(paths, engine, release.recipe)
    if running == release.tag:
        show("it is being served already")
    else:
        until = f" (until then {running} still answers)" if running else ""
        show(f"next: invoke serve --recipe {release.recipe}{until}")


@task("releases")
def rollback(
    paths: Paths,
    *,
    recipe: KnownRecipe = None,
    to: Annotated[str, "an earlier current release to go back to (default: the previous one)", "TAG"] = "",
    serve: Annotated[bool, "also serve it; if it does not become ready, nothing changes"] = False,
    dry_run: Annotated[bool, "print which release it would be, and change nothing"] = False,
) -> None:
    """Restore the previous release; repeat to go further back.

    invoke rollback --serve
    """
    from sparkpin.cli.choose import current_of  # slow to import, both
    from sparkpin.releases import rollback as rolling

    recipe = Releases(paths).get(to, recipe).recipe if to else recipe
    former = current_of(paths, recipe)  # before an engine is started
    engine = engine_of(paths)
    check = partial(require_as_recorded, paths)
    if to:
        release = rolling.require_target(paths, engine, former.recipe, to, check)
    else:
        release = rolling.find_target(paths, engine, former.recipe, check)
    if not dry_run:
        if serve:
            from sparkpin.cli import serve as serving  # slow to import

            serving.serve(paths, release.tag)
        current.make_current(paths, engine, release, instead_of=former)
    if former.tag == release.tag:
        show(f"{release.tag} is current already")
    else:
        show(f"{'would go back' if dry_run else 'back'} from {former.tag}")
        show(f"to {release.tag}: image {terminal.digest(release.image)}, checkpoint {release.checkpoint_key[:12]}")
        show(terminal.typed(f"what differs: invoke diff {former.tag} {release.tag}"))
    if dry_run:
        show("Dry run: nothing was changed.")
    elif not serve:
        next_serve(paths, engine, release)


@task("releases")
def keep(
    paths: Paths,
    tag: Annotated[str, "release to keep"],
    *,
    note: Annotated[str, "why, in one line"] = "",
    remove: Annotated[bool, "stop keeping it: `prune` may remove it again"] = False,
) -> None:
    """Protect a release from `prune`."""
    records = Releases(paths)
    if remove and note:
        raise InputError("--note goes with what is kept, not with --remove", next_step=f"invoke keep {tag} --remove")
    release = records.get(tag)
    if remove:
        show(f"{release.tag} is {'no longer' if unprotect(records, release) else 'not'} kept")
        return
    show(f"{release.tag} is {protect(records, release, note).text}")
    show(f"no prune removes it until: invoke keep {release.tag} --remove")
