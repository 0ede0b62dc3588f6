"""`invoke images`, `promote`, `rollback`, `keep`, `prune`, and tables of releases for a terminal of 80 columns."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from sparkpin.cli.tasks import DryRun, Json, KnownRecipe, task
from sparkpin.core import terminal
from sparkpin.core.errors import InputError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import count, printable, say, show, show_json
from sparkpin.host.engine import Engine, engine_of
from sparkpin.releases import current
from sparkpin.releases.protection import protect, unprotect
from sparkpin.releases.record import Release, Releases, state_text
from sparkpin.serve.served import name_of, recorded, running_release


@task("releases")
def images(paths: Paths, *, json: Json = False) -> None:
    """List the releases with their images.

    invoke images
    """
    found = current.list_images(paths, engine_of(paths))
    if json:
        show_json(found.rows)
    elif found.rows:
        show_images(found.rows, found.shared)
    else:
        show("no release yet; next: invoke up")
    for fault in found.faults[1:]:
        say(f"also damaged: {fault}")
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
    from sparkpin.releases import quality_gate  # slow to import, both, and `images` is asked for often
    from sparkpin.smoke.evidence import comparison_steps

    accept_loss = accept_loss.strip()  # blanks are no reason
    release = Releases(paths).get(tag, recipe)
    found = quality_gate.check(paths, release, accepted=accept_loss)
    engine = engine_of(paths)
    if release.is_good:
        require_as_recorded(paths, release, deep=deep)
    accepted = dict.fromkeys(found.lost, accept_loss) if accept_loss else None
    release = current.promote(paths, engine, release, accepted=accepted)
    show("\n".join([f"current release of {release.recipe}: {release.tag}", *found.notes]))
    if steps := comparison_steps(paths, release):
        say(f"warning: drift was not compared with the stage below; next: {'; '.join(steps)}")
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
    from sparkpin.releases import rollback as rolling  # slow to import

    recipe = Releases(paths).get(to, recipe).recipe if to else recipe
    former = current.current_of(paths, recipe)  # before an engine is started
    engine = engine_of(paths)
    check = partial(require_as_recorded, paths)
    if serve and not to:
        require_served(paths, engine, former)
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
        if serve:
            running = running_release(paths, engine, release.recipe)
            show(f"it would be served{f' in place of {running}' if running not in (None, release.tag) else ''}")
        show("Dry run: nothing was changed.")
    elif not serve:
        next_serve(paths, engine, release)


def require_served(paths: Paths, engine: Engine, current: Release) -> None:
    """InputError where another release than the current one is served: going back from one of the two would leave the
    other, and keep or serve what the person wants to be rid of."""
    running = running_release(paths, engine, current.recipe)
    if running not in (None, current.tag):
        raise InputError(
            f"{running} is served, and {current.tag} is current: it is not clear which of them is to go",
            next_step=f"invoke serve {current.tag} goes back to that; invoke rollback --serve --to TAG to another",
        )


@task("releases")
def keep(
    paths: Paths,
    tag: Annotated[str, "release to keep"],
    *,
    note: Annotated[str, "why, in one line"] = "",
    remove: Annotated[bool, "stop keeping it: `prune` may remove it again"] = False,
) -> None:
    """Protect a release from `prune`.

    invoke keep v2 --note "the customer's"
    """
    records = Releases(paths)
    if remove and note:
        raise InputError("--note goes with what is kept, not with --remove", next_step=f"invoke keep {tag} --remove")
    release = records.get(tag)
    if remove:
        show(f"{release.tag} is {'no longer' if unprotect(records, release) else 'not'} kept")
        return
    show(f"{release.tag} is {protect(records, release, note).text}")
    show(f"no prune removes it until: invoke keep {release.tag} --remove")


def tables(columns: Sequence[str], tags: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """One table for each recipe, whose name stands once above it: any task takes what follows it for the whole tag.
    rows: without the tag."""
    of_recipe: dict[str, list[Sequence[object]]] = {}
    for tag, row in zip(tags, rows, strict=True):
        recipe, _, name = tag.partition(":")
        of_recipe.setdefault(recipe, []).append((name, *row))
    for recipe, mine in of_recipe.items():
        terminal.show(f"{recipe}:")
        terminal.table(columns, mine)


def show_images(rows: Sequence[Mapping[str, Any]], shared: int | None) -> None:
    """rows: and shared: see `current.ImageRows`."""
    cells, notes = [], []
    for row in rows:
        verdict, colon, _ = row["smoke"].replace("passed in", "passed").partition(":")
        size = terminal.size(row["size"]) if row["image"] else "missing"
        created = row["created"][:16].replace("T", " ")
        state = "previous" if row["previous"] else state_text(row["state"])
        cells.append((state, verdict, size, terminal.size(row["unique_size"] or None), created))
        if colon:
            notes.append(f"{row['tag']}: smoke test {row['smoke']}")
        if protected := row["protected"]:
            note = f": {terminal.printable(protected['note'])}" * bool(protected["note"])
            notes.append(f"{row['tag']}: kept since {protected['since'][:10]}{note}")
    tables(("release", "state", "smoke", "size", "own size", "created"), [row["tag"] for row in rows], cells)
    if gone := sum(not row["image"] for row in rows):
        lost = f"the engine has not {terminal.count(gone, 'image')}"
        notes.append(terminal.typed(f"missing: {lost}: invoke reproduce TAG --keep makes it again"))
    if shared is not None:
        notes.append(f"own size: in no other image. What images share, counted once: {terminal.size(shared)}.")
    terminal.show("\n".join(notes))


@task("releases")
def prune(
    paths: Paths,
    *,
    keep: Annotated[int, "how many of a recipe stay (default: 5) besides current, previous, kept and used ones"] = 5,
    dry_run: DryRun = False,
    store: Annotated[bool, "also remove fetched files that no lock and no remaining release needs"] = False,
) -> None:
    """Remove old releases, and what only they needed.

    invoke prune --keep 3 --dry-run
    """
    from sparkpin.prune import plan as pruning  # slow to import, both
    from sparkpin.smoke.server import clear_leftovers

    engine = engine_of(paths)
    ignored = clear_leftovers(paths, engine, dry_run=dry_run)
    served = {tag: name_of(paths, recipe) for recipe, one in recorded(paths.home).items() for tag in one.tags}
    options = pruning.PruneOptions(
        keep=keep, now=time.time(), dry_run=dry_run, store=store, ignored=ignored, served=served
    )
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
