"""Which release is current, which one comes back, which ones stay, and the list of all with what they cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sparkpin.core.errors import CheckpointError, EngineError, InputError, IntegrityError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.core.tags import current_tag, image_ref
from sparkpin.core.terminal import Say
from sparkpin.host import disk_usage
from sparkpin.host.engine import Engine
from sparkpin.releases import quality_gate
from sparkpin.releases.keep import Pin, all_pins
from sparkpin.releases.record import Release, Releases
from sparkpin.releases.runs_here import obstacle_here

Look = Callable[[Release], object]
"""Raises where a release is not what its record says: `build.consistent`, which this room cannot reach."""


def promote(paths: Paths, engine: Engine, tag: str, look: Look = lambda release: None) -> Release:
    """Make a release that passed its smoke test the current one of its recipe; the former one retires.

    Running it again completes a promotion that was killed half-way. look: is asked before anything changes.
    """
    records = Releases(paths)
    with records.locked(records.get(tag).recipe):
        release = records.get(tag)
        if not release.is_good:
            if release.smoke_inspected:
                raise InputError(
                    f"{release.tag} is {release.smoke_text}, and no server of it has run: {release.smoke_why}; "
                    "only a release that passed its smoke test is promoted",
                    next_step=f"where it can run: invoke smoke {release.tag} (invoke export takes it there)",
                )
            why = f" (smoke test {release.smoke_text})" if release.smoke else ""
            raise InputError(
                f"{release.tag} is {release.state}{why}; only a release that passed its smoke test is promoted",
                next_step=f"invoke smoke {release.tag}",
            )
        look(release)
        switch(paths, engine, records, release)
        return records.get(release.tag)


def rollback(
    paths: Paths,
    engine: Engine,
    recipe: str,
    say: Say,
    look: Look = lambda release: None,
    then: Callable[[Release, Release], object] = lambda former, release: None,
) -> tuple[Release, Release]:
    """Go back to the newest release of the recipe that is older than the current one and that `promote` would take.
    Gives the one that was current, and the one that is now.

    Image, checkpoint and flags come back together: the record names all three. Nothing changes unless all are there.
    What passed its smoke test and has lost too much is passed over, and told; `promote` takes it by its name. So is a
    record that is not of what was built (IntegrityError of `look`).

    then: the rest of the command, after the pointer has moved. If it fails, the former release is current again. If it
    is interrupted or killed, the pointer still says that the rollback has not ended, and the next one does `then`
    alone, instead of going back once more.
    """
    records = Releases(paths)
    require_pointer(records, recipe)  # before the lock, which makes a folder
    try:
        with records.locked(recipe):
            unfinished = records.unfinished(recipe)
            former, release = unfinished or moved_back(paths, engine, records, recipe, say, look)
        if unfinished:
            say(
                f"finishing the rollback from {former.tag}, which was interrupted: {release.tag} is current already "
                "(once more the same command goes further back)"
            )
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


def moved_back(
    paths: Paths, engine: Engine, records: Releases, recipe: str, say: Say, look: Look
) -> tuple[Release, Release]:
    """As `rollback`, whose pointer says that it has not ended. The caller holds the recipe's lock."""
    over: list[SparkpinError] = []

    def refused(release: Release) -> bool:
        why: SparkpinError | None = quality_gate.refusal(paths, release)
        try:
            look(release)
        except IntegrityError as error:
            why = error
        if why:
            over.append(why)
            say(f"passed over {release.tag}: {why.message}")
        return why is not None

    known, _ = records.readable(recipe)
    current = next((release for release in known if release.state == "current"), None)
    current = current or require_current(records, recipe)  # which says what is wrong with it
    target = rollback_target(known, current, refused)
    if target is None:
        for why in over:
            if isinstance(why, IntegrityError):
                raise why
        raise InputError(
            f"there is no release of {recipe!r} to go back to: of those older than {current.tag} none passed "
            f"its smoke test{' without losing too much' if over else ''}",
            next_step=over[0].next_step
            if over
            else "invoke images lists the releases; invoke promote TAG chooses any one that passed",
        )
    switch(paths, engine, records, target, back_from=current.tag)
    return current, records.get(target.tag)


def rollback_target(releases: list[Release], current: Release, refused: Callable[[Release], bool]) -> Release | None:
    """The newest earlier release that passed and is not `refused`: of the same stage when there is one, else of any.

    One build makes a release of every stage of a chain, moments apart; the stage below in the same build is not what a
    person wants back. releases: from the oldest to the newest. refused: asked of each once, as far as it has to be.
    """
    earlier = [release for release in reversed(releases) if release.age < current.age and release.is_good]
    by_worth = sorted(earlier, key=lambda release: release.stage != current.stage)
    return next((release for release in by_worth if not refused(release)), None)


@dataclass(frozen=True)
class Verdict:
    """What `prune` makes of a release. reasons: why it stays; none: it goes."""

    release: Release
    reasons: tuple[str, ...]


def verdicts(
    releases: list[Release],
    keep: int,
    pins: Mapping[str, Pin],
    used: Mapping[str, str],
    refused: Callable[[Release], bool],
) -> list[Verdict]:
    """For the releases of one recipe (from the oldest to the newest), the most worthy first.

    The first `keep` stay, the current one counted. Whatever `keep` is, so do the current one, the newest that passed,
    the pinned, and those whose image a container uses. used: release tag -> name of the container; refused: whether
    `promote` would not take it.
    """
    current = next((release for release in releases if release.state == "current"), None)
    back = rollback_target(releases, current, refused) if current else None
    passed_last = next((release for release in reversed(releases) if release.is_good), None)
    by_worth = sorted(releases, key=lambda r: (r == current, r == back, r.is_good, r.age), reverse=True)
    found = []
    for place, release in enumerate(by_worth):
        user = used.get(release.tag)
        pin = pins.get(release.tag)
        reasons = (
            "current" if release == current else "",
            "passed last" if release == passed_last else "",
            pin.text if pin else "",
            f"in use by the container {user}" if user else "",
            f"one of the {keep} to keep" if place < keep else "",
            "to roll back to" if place < keep and release == back else "",
        )
        found.append(Verdict(release, tuple(filter(None, reasons))))
    return found


def switch(paths: Paths, engine: Engine, records: Releases, release: Release, *, back_from: str = "") -> None:
    """First the image's tags, then the pointer, which is the truth. The caller holds the recipe's lock.

    back_from: as of `Releases.point`.
    """
    ref = present_ref(engine, release)
    if ref is None:
        raise EngineError(
            f"the image of {release.tag} ({release.image}) is not in the engine",
            next_step=how_to_rebuild(release),
        )
    if not records.checkpoint(release).is_dir():
        raise CheckpointError(
            f"the checkpoint of {release.tag} is gone: no folder {records.checkpoint(release)}",
            next_step=how_to_rebuild(release),
        )
    if ref != release.tag:
        engine.tag(ref, release.tag)
    engine.tag(ref, current_tag(release.recipe))
    records.point(release, back_from=back_from)


def present_ref(engine: Engine, release: Release) -> str | None:
    """A name under which the engine holds exactly the image that was recorded.

    The release's own tag may be gone or moved by hand; the digest itself is a name on most engines.
    """
    for ref in (release.tag, release.image, image_ref(release.stack, release.stage, release.build_key)):
        info = engine.image(ref)
        if info is not None and info.config_digest == release.image:
            return ref
    return None


def require_pointer(records: Releases, recipe: str) -> None:
    """InputError where no release of the recipe is current."""
    if not records.pointer_path(recipe).exists():
        raise nothing_current(records, recipe)


def require_current(records: Releases, recipe: str) -> Release:
    if current := records.current(recipe):
        return current
    raise nothing_current(records, recipe)


def nothing_current(records: Releases, recipe: str) -> InputError:
    known = records.of_recipe(recipe)
    step = f"invoke up --recipe {recipe} (it builds and smokes; the first release that passes becomes current)"
    if known:
        good = next((release for release in reversed(known) if release.is_good), None)
        step = f"invoke promote {good.tag}" if good else step_to_current(records.paths, known[-1])
    return InputError(f"recipe {recipe!r} has no current release", next_step=step)


def step_to_current(paths: Paths, newest: Release) -> str:
    """What makes a recipe have a current release, of which none has passed."""
    if why := obstacle_here(paths, newest):
        there = f"invoke smoke {newest.tag} (invoke export takes it there)"
        return f"none can run here: {why}; where one can: {there}"
    return f"invoke smoke --recipe {newest.recipe}, then invoke promote TAG (one that passed)"


def how_to_rebuild(release: Release) -> str:
    return f"invoke rebuild {release.tag} makes image and checkpoint again from the record; then the same command"


def rows(paths: Paths, engine: Engine) -> tuple[list[dict[str, Any]], int | None]:
    """One mapping per release for `invoke images`, from the newest to the oldest in each recipe; plain JSON values.
    Besides, the bytes of the layers of these images that are in no row's unique_size, each counted once.

    Records that are damaged are left out: `Releases.faults` tells of them.

    image is None where the engine does not hold the recorded image; sizes in bytes; unique_size counts the layers that
    no other image of the engine shares, None where the engine does not tell; pin: since when and why, None for most;
    host: the machine that made it, None in old records.
    """
    records = Releases(paths)
    releases = [release for recipe in records.recipes() for release in records.readable(recipe)[0]]
    pins = all_pins(records)
    images = disk_usage.inventory(engine)
    by_tag = {tag: image for image in images for tag in image.tags}
    found: list[dict[str, Any]] = []
    present: dict[str, disk_usage.EngineImage] = {}
    for release in sorted(releases, key=lambda release: release.age, reverse=True):
        image = by_tag.get(release.tag)
        if image and image.config_digest != release.image:  # the tag names another one
            image = None
        if image:
            present[image.id] = image
        found.append(
            {
                "tag": release.tag,
                "recipe": release.recipe,
                "stage": release.stage,
                "key": release.key,
                "image": release.image if image else None,
                "size": release.size,
                "unique_size": disk_usage.unique_size(image, images) if image else 0,
                "created": release.created,
                "state": release.state,
                "smoke": release.smoke_text,
                "pin": pins[release.tag].model_dump() if release.tag in pins else None,
                "host": release.host.model_dump() if release.host else None,
            }
        )
    own = [disk_usage.unique_size(image, images) for image in present.values()]
    shared = None
    if present and None not in own:
        shared = sum(disk_usage.all_layers(present.values()).values()) - sum(filter(None, own))
    return sorted(found, key=lambda row: str(row["recipe"])), shared
