"""`invoke images`, `promote`, `rollback`, `keep`."""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path
from typing import Annotated

from sparkpin.cli import tables
from sparkpin.cli.choose import choose_known, require_recipe
from sparkpin.cli.options import Drain, Json, Recipe
from sparkpin.cli.tasks import task
from sparkpin.core import terminal
from sparkpin.core.errors import InputError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.core.progress import waiting
from sparkpin.core.terminal import say, show, show_json
from sparkpin.host import machine
from sparkpin.host.engine import Engine, engine_of
from sparkpin.pins.vllm_flags import parse_flags
from sparkpin.releases import current, quality_gate
from sparkpin.releases import keep as pinned
from sparkpin.releases import rollback as rolling
from sparkpin.releases.record import Release, Releases
from sparkpin.serve import linked
from sparkpin.serve.served import running_release

FIRST = 12  # lines of `diff` in a dry run


@task("releases")
def images(*, json: Json = False) -> None:
    """List the releases with their images."""
    paths = Paths.from_env()
    with waiting(say, "asking the engine for its images"):
        rows, shared = current.rows(paths, engine_of(paths))
    if json:
        show_json(rows)
    elif rows:
        tables.show_images(rows, shared)
    else:
        show("no release yet; next: invoke up")
    faults = Releases(paths).faults()
    for fault in faults[1:]:
        say(f"damaged, too: {fault}")
    if faults:
        raise faults[0]


@task("releases")
def promote(
    tag: Annotated[str, "release that passed its smoke test"],
    *,
    recipe: Recipe = None,
    accept_loss: Annotated[
        str, "why it may lose more quality than its stage allows; recorded with the release", "WHY"
    ] = "",
    deep: Annotated[bool, "hash its whole checkpoint, not only small files and those whose time has changed"] = False,
) -> None:
    """Make a release the current one of its recipe.

    invoke promote v2-tq
    """
    paths = Paths.from_env()
    accept_loss = accept_loss.strip()  # blanks are no reason
    asked = Releases(paths).get(tag, recipe)
    told = quality_gate.check(paths, asked, accepted=accept_loss)
    engine = engine_of(paths)
    from sparkpin.build.consistent import require_consistent  # slow to import

    hashed: list[Path] = []

    def look(wanted: Release) -> None:
        linked.require_there(paths, wanted)
        hashed.extend(
            require_consistent(paths, wanted, finished=True, hashing=lambda file: say(f"hashing {file}"), deep=deep)
        )

    release = current.promote(paths, engine, asked.tag, look)
    show(f"current release of {release.recipe}: {release.tag}")
    if deep:
        total = terminal.size(sum(file.stat().st_size for file in hashed))
        show(f"hashed: {terminal.count(len(hashed), 'file')} of its checkpoint, {total}, each as its record names it")
    for line in told:
        show(line)
    if accept_loss:
        quality_gate.note_accepted(paths, release, accept_loss)
    next_serve(paths, engine, release)


def next_serve(paths: Paths, engine: Engine, release: Release) -> None:
    """What answers now goes on answering until `serve` changes it."""
    running = running_release(paths, engine, release.recipe)
    if running == release.tag:
        show("it is being served already")
    else:
        until = f" (until then {running} still answers)" if running else ""
        show(f"next: {machine.serve_command(paths.project, release.recipe)}{until}")


@task("releases")
def rollback(
    *,
    recipe: Recipe = None,
    to: Annotated[str, "an earlier current release to go back to (default: the previous one)", "TAG"] = "",
    serve: Annotated[bool, "also serve it; if it does not become ready, nothing changes"] = False,
    drain: Drain = None,
    dry_run: Annotated[bool, "print which release it would be and what differs, and change nothing"] = False,
) -> None:
    """Restore the previous release; repeat to go further back.

    invoke rollback --serve
    """
    paths = Paths.from_env()
    records = Releases(paths)
    if to and not recipe:
        with contextlib.suppress(InputError):  # it may be of several recipes
            recipe = records.get(to).recipe
    name = choose_known(paths, recipe)
    for fault in require_recipe(paths, records, name):
        say(f"passed over: {fault}")
    current.require_pointer(records, name)  # before an engine is started
    engine = engine_of(paths)
    running = running_release(paths, engine, name)
    from sparkpin.build.consistent import require_consistent  # slow to import

    def look(wanted: Release) -> None:
        linked.require_there(paths, wanted)
        require_consistent(paths, wanted, finished=True)

    def then(former: Release, release: Release) -> None:
        for line in went_back(former, release, running):
            show(line)
        if serve:
            from sparkpin.cli.serve import serve_release  # slow to import

            serve_release(recipe=name, release=release.tag, drain=drain)
        else:
            next_serve(paths, engine, release)

    if dry_run:
        former, release, _ = rolling.way_back(paths, engine, name, say, look, to=to)
        for line in (*went_back(former, release, running, "would go back"), *differences(paths, former, release)):
            show(line)
        show("image and checkpoint are there; nothing was changed")
    else:
        rolling.rollback(paths, engine, name, say, look, then, to=to)


def differences(paths: Paths, former: Release, release: Release) -> list[str]:
    """The first lines of `diff`, without the sides."""
    from sparkpin.history import operands, text  # slow to import

    command = f"invoke diff {former.tag} {release.tag}"
    try:
        found = text.difference_lines(operands.difference(paths, former.tag, release.tag), all_files=False)
        lines = [line for line in list(found)[2:] if line]
    except SparkpinError as error:
        return [f"{command}: {error.message}"]
    more = [f"  ... {command}"] if lines[FIRST:] else []
    return ["what differs:", *(f"  {line}".rstrip() for line in lines[:FIRST]), *more]


def went_back(former: Release, release: Release, running: str | None, word: str = "back") -> list[str]:
    """What a rollback did. running: tag of what was served, which need not be what was current."""
    lines = [
        f"{word} from {former.tag}",
        f"to {release.tag}: image {terminal.digest(release.image)}, checkpoint {release.checkpoint_key[:12]}",
        *changed_flags(former.argv, release.argv),
    ]
    if running not in (None, former.tag, release.tag):
        lines.append(
            f"note: {running} was served, and {former.tag} was current, which rollback goes by; if that was meant to "
            f"come back: invoke promote {former.tag}, then invoke serve {former.tag}"
        )
    return lines


def changed_flags(before: tuple[str, ...], after: tuple[str, ...]) -> list[str]:
    """One line for each flag, with its values, that went or came."""
    old, new = ([shlex.join(flag.words) for flag in parse_flags(argv)[1]] for argv in (before, after))
    if old == new:
        return ["flags: the same"]
    return [f"  - {flag}" for flag in old if flag not in new] + [f"  + {flag}" for flag in new if flag not in old]


@task("releases")
def keep(
    tag: Annotated[str, "release to keep"],
    *,
    note: Annotated[str, "why, in one line"] = "",
    remove: Annotated[bool, "stop keeping it: `prune` may remove it again"] = False,
) -> None:
    """Protect a release from `prune`."""
    records = Releases(Paths.from_env())
    if remove and note:
        raise InputError(
            f"--note {note!r} is of what is kept, --remove of what is not", next_step=f"invoke keep {tag} --remove"
        )
    if remove:
        was_kept = pinned.unpin(records, tag)
        show(f"{records.get(tag).tag} is {'no longer' if was_kept else 'not'} kept")
        return
    release, made = pinned.pin(records, tag, note)
    show(f"{release.tag} is {made.text}")
    show(f"no prune removes it until: invoke keep {release.tag} --remove")
