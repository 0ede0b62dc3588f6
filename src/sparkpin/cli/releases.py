"""`invoke images`, `promote`, `rollback`, `keep`."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

from sparkpin.cli import tables
from sparkpin.cli.choose import choose_known, require_recipe
from sparkpin.cli.options import Drain, Json, KnownRecipe
from sparkpin.cli.tasks import task
from sparkpin.core import terminal
from sparkpin.core.errors import InputError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.core.progress import waiting
from sparkpin.core.terminal import say, show, show_json
from sparkpin.host import machine
from sparkpin.host.engine import Engine, engine_of
from sparkpin.pins.vllm_flags import parse_flags
from sparkpin.releases import current
from sparkpin.releases.protection import protect, unprotect
from sparkpin.releases.record import Release, Releases
from sparkpin.serve.served import running_release

FIRST = 12  # lines of `diff` in a dry run


@task("releases")
def images(*, json: Json = False) -> None:
    """List the releases with their images."""
    paths = Paths.from_env()
    with waiting("asking the engine for its images"):
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
    tag: Annotated[str, "release that passed its smoke test"],
    *,
    recipe: KnownRecipe = None,
    accept_loss: Annotated[
        str, "why it may lose more quality than its stage allows; recorded with the release", "WHY"
    ] = "",
    deep: Annotated[bool, "hash its whole checkpoint, not only small files and those whose time has changed"] = False,
) -> None:
    """Make a release the current one of its recipe.

    invoke promote v2-tq
    """
    from sparkpin.releases import quality_gate  # slow to import, and `images` is asked for often

    paths = Paths.from_env()
    accept_loss = accept_loss.strip()  # blanks are no reason
    release = Releases(paths).get(tag, recipe)
    notes = quality_gate.check(paths, release, accepted=accept_loss)
    engine = engine_of(paths)
    hashed = require_as_recorded(paths, release, deep=deep) if release.is_good else []
    release = current.promote(paths, engine, release)
    show(f"current release of {release.recipe}: {release.tag}")
    if deep:
        total = terminal.size(sum(file.stat().st_size for file in hashed))
        show(f"hashed: {terminal.count(len(hashed), 'file')} of its checkpoint, {total}, each as its record names it")
    for line in notes:
        show(line)
    if accept_loss:
        quality_gate.note_accepted(paths, release, accept_loss)
    next_serve(paths, engine, release)


def require_as_recorded(paths: Paths, release: Release, *, deep: bool = False) -> Sequence[Path]:
    """Raises where a release is not what its record says, here or on the machines that its recipe is served on. The
    files of its checkpoint that were hashed."""
    from sparkpin.build.consistent import require_consistent  # slow to import, both
    from sparkpin.serve import linked

    linked.require_there(paths, release)
    return require_consistent(paths, release, finished=True, hashing=lambda file: say(f"hashing {file}"), deep=deep)


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
    recipe: KnownRecipe = None,
    to: Annotated[str, "an earlier current release to go back to (default: the previous one)", "TAG"] = "",
    serve: Annotated[bool, "also serve it; if it does not become ready, nothing changes"] = False,
    drain: Drain = None,
    dry_run: Annotated[bool, "print which release it would be and what differs, and change nothing"] = False,
) -> None:
    """Restore the previous release; repeat to go further back.

    invoke rollback --serve
    """
    from sparkpin.releases import rollback as rolling  # slow to import

    paths = Paths.from_env()
    records = Releases(paths)
    if to and not recipe:
        with contextlib.suppress(InputError):  # it may be of several recipes
            recipe = records.get(to).recipe
    name = choose_known(paths, recipe)
    if not records.current_tag(name):
        require_recipe(paths, records, name)  # an unknown name is another mistake
    former = current.require_current(records, name)  # before an engine is started
    engine = engine_of(paths)
    check = partial(require_as_recorded, paths)
    if to:
        release = rolling.require_target(paths, engine, name, to, check)
    else:
        release = rolling.find_target(paths, engine, name, check)
    running = running_release(paths, engine, name)
    if dry_run:
        lines = (*went_back(former, release, running, "would go back"), *differences(paths, former, release))
        show("\n".join((*lines, "image and checkpoint are there; nothing was changed")))
        return
    if serve:
        from sparkpin.cli.serve import serve_release  # slow to import

        serve_release(recipe=name, release=release.tag, drain=drain)
    try:
        current.make_current(paths, engine, release, instead_of=former)
    except InputError as error:
        if serve and (now := records.current_tag(name)):  # it answers by now, and is not current
            error.next_step = f"{release.tag} is being served; what is current: invoke serve {now}; {error.next_step}"
        raise
    show("\n".join(went_back(former, release, running)))
    if not serve:
        next_serve(paths, engine, release)


def differences(paths: Paths, former: Release, release: Release) -> list[str]:
    """The first lines of `diff`, without the sides."""
    from sparkpin.history import diff_text, sides  # slow to import

    command = f"invoke diff {former.tag} {release.tag}"
    try:
        found = diff_text.difference_lines(sides.difference(paths, former.tag, release.tag), all_files=False)
        lines = [line for line in list(found)[2:] if line]
    except SparkpinError as error:
        return [f"{command}: {error.message}"]
    more = [f"  ... {command}"] if lines[FIRST:] else []
    return ["what differs:", *(f"  {line}".rstrip() for line in lines[:FIRST]), *more]


def went_back(former: Release, release: Release, running: str | None, word: str = "back") -> list[str]:
    """What a rollback did. running: tag of what was served, which need not be what was current."""
    if former.tag == release.tag:
        return [f"{release.tag} is current already"]
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
    release = records.get(tag)
    if remove:
        show(f"{release.tag} is {'no longer' if unprotect(records, release) else 'not'} kept")
        return
    show(f"{release.tag} is {protect(records, release, note).text}")
    show(f"no prune removes it until: invoke keep {release.tag} --remove")
