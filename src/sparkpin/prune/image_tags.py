"""Which of the engine's tags go with the releases that go, and which must name another image then. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from sparkpin.core.tags import UNSEALED, current_tag, is_internal, repository_of, stage_tag
from sparkpin.host.disk_usage import EngineImage, is_below
from sparkpin.releases.record import Release

STALE_AFTER = 3600.0  # seconds


@dataclass(frozen=True)
class TagPlan:
    """retag: moving tag -> release tag that it must name afterwards; that comes first.

    internal: those of `untag` that no release is named by.
    """

    untag: tuple[str, ...]
    retag: Mapping[str, str]
    internal: tuple[str, ...] = ()

    def applied(self, images: Sequence[EngineImage]) -> tuple[EngineImage, ...]:
        """The images that the engine has afterwards: one goes when its last tag is taken from it."""
        gone = {*self.untag, *self.retag}
        left = []
        for image in images:
            tags = {tag for tag in image.tags if tag not in gone}
            tags |= {moving for moving, target in self.retag.items() if target in image.tags}
            if tags or not set(image.tags) & set(self.untag):
                left.append(dataclasses.replace(image, tags=tuple(sorted(tags))))
        return tuple(left)


def plan_tags(
    images: Sequence[EngineImage],
    used: Collection[str],
    remaining: Sequence[Release],
    removed: Sequence[Release],
    keys_here: Collection[str],
    now: float,
) -> TagPlan:
    """Of removed releases, of stages' images and root file systems that none stands on, and of unfinished images.

    What no release has ever named may belong to a build that runs right now: it goes once it is `STALE_AFTER` old, and
    only where this home made it, for homes share an engine and another home's records are not here. The tags of its
    releases are: what they stand on stays.

    Args:
        used: ids of images that containers use.
        keys_here: as of `build.record`.
        now: seconds since the epoch.
    """
    ids = {tag: image.id for image in images for tag in image.tags}
    moving, retag = moving_tags(remaining, removed, ids)
    moving = [tag for tag in moving if ids[tag] not in used]  # the engine would refuse
    release_tags = [release.tag for release in removed if release.tag in ids]
    leaving = {*release_tags, *moving, *retag}  # tags that will no longer name what they name now
    others = [
        image.diff_ids
        for image in images
        for tag in image.tags
        if (owner := repository_of(tag)) and not is_internal(owner) and tag not in leaving
    ]
    needed = [*(release.diff_ids for release in remaining), *others]
    internal: list[str] = []
    for image in images:
        own = [tag for tag in image.tags if is_internal(repository_of(tag))]
        is_unfinished = all(repository_of(tag) == UNSEALED for tag in own)  # a killed build left it
        if not own or image.id in used:
            continue
        if not is_unfinished and any(is_below(image.diff_ids, upper) for upper in needed):
            continue
        if not is_unfinished and any(is_below(image.diff_ids, release.diff_ids) for release in removed):
            internal += own
        elif image.tagged is not None and now - datetime.fromisoformat(image.tagged).timestamp() > STALE_AFTER:
            internal += [tag for tag in own if tag[-12:] in keys_here]
    return TagPlan((*release_tags, *moving, *internal), retag, tuple(internal))


def moving_tags(
    remaining: Sequence[Release], removed: Sequence[Release], ids: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """The moving tags that go, and those that must name another release: the newest that remains of the stage.

    Only those that name an image which goes: another home may have moved them to its own.
    """
    gone: list[str] = []
    going = {ids[release.tag] for release in removed if release.tag in ids}
    retag: dict[str, str] = {}
    for recipe, stage in sorted({(release.recipe, release.stage) for release in removed}):
        tag = stage_tag(recipe, stage)
        others = [r for r in remaining if (r.recipe, r.stage) == (recipe, stage) and r.tag in ids]
        if others:
            retag[tag] = max(others, key=lambda release: release.age).tag
        elif ids.get(tag) in going:
            gone.append(tag)
    current = {release.recipe: release for release in remaining if release.state == "current"}
    for recipe in sorted({release.recipe for release in removed}):
        tag = current_tag(recipe)
        if tag in ids and recipe in current and current[recipe].tag in ids:
            retag[tag] = current[recipe].tag
        elif ids.get(tag) in going and recipe not in current:
            gone.append(tag)
    return gone, {tag: to for tag, to in retag.items() if ids.get(tag, "") in going and ids[tag] != ids[to]}
