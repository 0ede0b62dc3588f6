"""Back to what was current before: where a rollback lands, and the switch, which survives being killed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

from sparkpin.core.errors import CheckpointError, InputError, IntegrityError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import Say
from sparkpin.host.engine import Engine
from sparkpin.releases import lookup, quality_gate
from sparkpin.releases.current import Look, gone, present_ref, require_current, require_pointer, switch
from sparkpin.releases.record import Release, Releases


def rollback(
    paths: Paths,
    engine: Engine,
    recipe: str,
    say: Say,
    look: Look = lambda release: None,
    then: Callable[[Release, Release], object] = lambda former, release: None,
    *,
    to: str = "",
) -> tuple[Release, Release]:
    """Go back to what was current before, as `way_back` says. Gives the one that was current, and the one that is now.

    Image, checkpoint and flags come back together: the record names all three. Nothing changes unless all are there.

    then: the rest of the command, after the pointer has moved. If it fails, the former release is current again. If it
    is interrupted or killed, the pointer still says that the rollback has not ended, and the next one does `then`
    alone, instead of going back once more.
    """
    records = Releases(paths)
    require_pointer(records, recipe)  # before the lock, which makes a folder
    try:
        with records.locked(recipe):
            former, release, begun = way_back(paths, engine, recipe, say, look, to=to)
            if not begun:
                switch(paths, engine, records, release, back_from=former.tag)
                release = records.get(release.tag)
        try:
            then(former, release)
        except SparkpinError:
            with records.locked(recipe):
                if records.current_tag(recipe) == release.tag:  # nobody has promoted another one meanwhile
                    switch(paths, engine, records, former)
                    say(f"current again, since {release.tag} could not be served: {former.tag}")
            raise
        records.finish(recipe)
    except KeyboardInterrupt:
        again = "; the same command again finishes this rollback, and goes no further back"
        say(f"current is {records.current_tag(recipe)}{again if records.unfinished(recipe) else ''}")
        raise
    return former, release


def way_back(
    paths: Paths, engine: Engine, recipe: str, say: Say, look: Look = lambda release: None, *, to: str = ""
) -> tuple[Release, Release, bool]:
    """What is left, where a rollback lands, and whether that one is current already, because a rollback was
    interrupted. Changes nothing.

    It lands on what was current last before, and goes on to the one before that where `promote` would refuse it
    (quality, or IntegrityError or CheckpointError of `look`) or where image, checkpoint or record are gone; that is
    told. to: a name (`lookup`) of what was current before; nothing else will do then.
    """
    records = Releases(paths)
    known, _ = records.readable(recipe)
    named = {release.tag: release for release in known}
    if (unfinished := records.unfinished(recipe)) and (not to or lookup.matches(to, unfinished[1:])):
        say(
            f"finishing the rollback from {unfinished[0].tag}, which was interrupted: {unfinished[1].tag} is current "
            "already (once more the same command goes further back)"
        )
        return *unfinished, True
    current = next((release for release in known if release.state == "current"), None)
    current = current or require_current(records, recipe)  # which says what is wrong with it
    before, over = records.before(recipe), list[SparkpinError]()

    def fault(release: Release) -> SparkpinError | None:
        if not release.is_good:
            return InputError(f"{release.tag} is {release.state} now", next_step=f"invoke smoke {release.tag}")
        ref = present_ref(engine, release)
        if why := gone(paths, release, ref) or quality_gate.refusal(paths, release):
            return why
        try:
            look(release)
        except (IntegrityError, CheckpointError) as error:
            return error
        return None

    def refused(release: Release) -> bool:
        if why := fault(release):
            over.append(why)
            say(f"passed over {release.tag}: {why.message}")
        return why is not None

    if to:
        target = chosen(records, recipe, to, current, [named[tag] for tag in before if tag in named])
        if why := fault(target):
            raise why
        return current, target, False
    found = landing(known, current, before, refused)
    later = takewhile(lambda tag: found is None or tag != found.tag, reversed(before))
    files = {path.stem for path in records.record_files(recipe)}  # what is damaged is no loss, and told by others
    if lost := [tag for tag in dict.fromkeys(later) if tag.partition(":")[2] not in files]:
        say(f"passed over, since they were removed: {', '.join(lost)}")
    if found is None:
        if over:
            raise next((why for why in over if isinstance(why, IntegrityError)), over[0])
        raise InputError(
            f"there is no release of {recipe!r} to go back to from {current.tag}",
            next_step="invoke images lists the releases; invoke promote TAG chooses any one that passed",
        )
    if found.tag not in before:
        say(
            f"nothing is left that was current before {current.tag}: back to one that passed and never was, {found.tag}"
        )
    return current, found, False


def landing(
    known: Sequence[Release], current: Release, before: Sequence[str], refused: Callable[[Release], bool]
) -> Release | None:
    """The last of `before` that is there and not `refused`; where there is none, the newest that is older than the
    current one, passed and never was current: of its stage when there is one, else of any.

    One build makes a release of every stage of a chain, moments apart; the stage below in the same build is not what a
    person wants back. known: from the oldest to the newest; refused: asked of each once, as far as it has to be.
    """
    named = {release.tag: release for release in known}
    were = [named[tag] for tag in dict.fromkeys(reversed(before)) if tag in named and tag != current.tag]
    never = [one for one in reversed(known) if one.age < current.age and one.state == "passed" and one not in were]
    never.sort(key=lambda release: release.stage != current.stage)
    return next((release for release in [*were, *never] if not refused(release) and release.is_good), None)


def chosen(records: Releases, recipe: str, to: str, current: Release, were: Sequence[Release]) -> Release:
    """The release of `--to`. InputError for one that was not current before."""
    were = [release for release in were if release.tag != current.tag]  # promoted more than once
    if found := lookup.matches(to, were):
        return found[-1]
    other = records.get(to, recipe)
    if other.tag == current.tag:
        raise InputError(f"{other.tag} is current already", next_step="invoke images lists the others")
    tags = list(dict.fromkeys(release.tag for release in reversed(were)))
    raise InputError(
        f"{other.tag} is {other.state_text}, and was not current before {current.tag}"
        + (f"; these were, the last first: {', '.join(tags[: lookup.FEW])}" if tags else ""),
        next_step=f"invoke promote {other.tag}, which goes anywhere",
    )
