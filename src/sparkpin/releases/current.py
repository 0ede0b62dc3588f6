"""Which release is current, and the list of all with what they cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparkpin.core.errors import CheckpointError, EngineError, InputError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.core.tags import current_tag, image_ref
from sparkpin.host import disk_usage
from sparkpin.host.engine import Engine
from sparkpin.releases.keep import all_pins
from sparkpin.releases.record import Release, Releases
from sparkpin.releases.runs_here import obstacle_here, with_others

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
                    next_step=with_others(paths, release)
                    or f"where it can run: invoke smoke {release.tag} (invoke export takes it there)",
                )
            why = f" (smoke test {release.smoke_text})" if release.smoke else ""
            raise InputError(
                f"{release.tag} is {release.state}{why}; only a release that passed its smoke test is promoted",
                next_step=f"invoke smoke {release.tag}",
            )
        look(release)
        switch(paths, engine, records, release)
        return records.get(release.tag)


def switch(paths: Paths, engine: Engine, records: Releases, release: Release, *, back_from: str = "") -> None:
    """First the image's tags, then the pointer, which is the truth. The caller holds the recipe's lock.

    back_from: as of `Releases.point`.
    """
    ref = present_ref(engine, release)
    if why := gone(paths, release, ref):
        raise why
    assert ref
    if ref != release.tag:
        engine.tag(ref, release.tag)
    engine.tag(ref, current_tag(release.recipe))
    records.point(release, back_from=back_from)


def gone(paths: Paths, release: Release, ref: str | None) -> SparkpinError | None:
    """That the engine lacks the release's image, or the home its checkpoint; None where both are there.

    ref: as of `present_ref`.
    """
    if ref is None:
        return EngineError(
            f"the image of {release.tag} ({release.image}) is not in the engine", next_step=how_to_rebuild(release)
        )
    folder = Releases(paths).checkpoint(release)
    if not folder.is_dir():
        return CheckpointError(
            f"the checkpoint of {release.tag} is gone: no folder {folder}", next_step=how_to_rebuild(release)
        )
    return None


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
        if step := with_others(paths, newest):
            return f"{step}; invoke promote {newest.tag}"
        there = f"invoke smoke {newest.tag} (invoke export takes it there)"
        return f"none can run here: {why}; where one can: {there}"
    return f"invoke smoke --recipe {newest.recipe}, then invoke promote TAG (one that passed)"


def how_to_rebuild(release: Release) -> str:
    return f"invoke reproduce {release.tag} --keep makes image and checkpoint again; then the same command"


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
