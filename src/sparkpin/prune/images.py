"""What the engine has of releases, and which of its tags go with those that go."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from sparkpin.core.tags import UNSEALED, is_internal, repository_of, stage_tag
from sparkpin.host.engine import Engine, engine_errors
from sparkpin.host.images import ImageInfo, is_below
from sparkpin.releases.container import CACHE_LABEL
from sparkpin.releases.record import Release

STALE_AFTER = 3600.0
"""Seconds after which a file that nothing needs, and that no removed release had, no longer counts as the work of a run
that goes on, or was killed and is repeated: the one rule of age, for images and files."""


@dataclass(frozen=True)
class EngineState:
    """used: image id -> container; volumes: name -> config digest of the image whose caches it holds, of those that no
    container mounts."""

    images: tuple[ImageInfo, ...]
    used: Mapping[str, str]
    volumes: Mapping[str, str]

    @property
    def users(self) -> dict[str, str]:
        """Tag -> name of a container that uses its image."""
        return {tag: self.used[image.id] for image in self.images if image.id in self.used for tag in image.tags}

    def without(self, tags: Collection[str]) -> list[ImageInfo]:
        """The images that the engine has once these tags are gone: one goes with the last of its tags."""
        gone = set(tags)
        return [image for image in self.images if not gone.intersection(image.tags) or not gone.issuperset(image.tags)]


def read_engine(engine: Engine, ignored: Collection[str]) -> EngineState:
    """ignored: ids of containers that count as gone."""
    with engine_errors():
        containers = [c for c in engine.client.api.containers(all=True) if c["Id"] not in ignored]
        volumes = engine.client.volumes.list(filters={"label": CACHE_LABEL})
    mounted = {mount.get("Name") for container in containers for mount in container.get("Mounts") or ()}
    return EngineState(
        images=tuple(engine.images()),
        # A stopped container counts: it may be started again.
        used={c["ImageID"]: (c["Names"] or [c["Id"][:12]])[0].removeprefix("/") for c in containers},
        volumes={
            volume.name: (volume.attrs.get("Labels") or {}).get(CACHE_LABEL, "")
            for volume in sorted(volumes, key=lambda volume: str(volume.name))
            if volume.name not in mounted
        },
    )


def unneeded_tags(
    state: EngineState, staying: Sequence[Release], removed: Sequence[Release], keys_here: Collection[str], now: float
) -> tuple[str, ...]:
    """Tags of removed releases, of stages' images and root file systems that none stands on, and of unfinished images.

    What no release has ever named may belong to a build that runs right now: it goes once it is `STALE_AFTER` old, and
    only where this data directory made it (keys_here: as of `build.record`), for several may share an engine, and
    another's records are not here. The tags of its releases are: what they stand on stays.
    """
    of_releases = moving_and_own_tags(state, removed)
    others = [
        image.diff_ids
        for image in state.images
        for tag in image.tags
        if (owner := repository_of(tag)) and not is_internal(owner) and tag not in of_releases
    ]
    needed = [*(release.diff_ids for release in staying), *others]
    found: list[str] = []
    for image in state.images:
        tags = [tag for tag in image.tags if is_internal(repository_of(tag))]
        if not tags or image.id in state.used:
            continue
        is_finished = any(repository_of(tag) != UNSEALED for tag in tags)  # a killed build leaves others
        if is_finished and any(is_below(image.diff_ids, upper) for upper in needed):
            continue
        if is_finished and any(is_below(image.diff_ids, release.diff_ids) for release in removed):
            found += tags
        elif image.tagged and now - datetime.fromisoformat(image.tagged).timestamp() > STALE_AFTER:
            found += [tag for tag in tags if tag[-12:] in keys_here]
    return (*of_releases, *sorted(found))


def moving_and_own_tags(state: EngineState, removed: Sequence[Release]) -> list[str]:
    """The tags of removed releases, and the moving tag of a stage where it names one of their images: another data
    directory may have moved it to its own."""
    ids = {tag: image.id for image in state.images for tag in image.tags}
    tags = [release.tag for release in removed if release.tag in ids]
    going = {ids[tag] for tag in tags} - state.used.keys()  # the engine would refuse
    moving = dict.fromkeys(stage_tag(release.recipe, release.stage) for release in removed)
    return [*tags, *(tag for tag in moving if ids.get(tag) in going)]
