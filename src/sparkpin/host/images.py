"""An image as the engine has it, and what images cost on its disk: bytes per layer, and which layers are shared.

Sizes are those of the image's history: the engine's own answer (`docker system df -v`) walks every volume and container
as well, and takes seconds to minutes on a used machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from itertools import accumulate
from typing import Any

from sparkpin.image.oci import digest_of
from sparkpin.image.seal import CREATED, CREATED_BY, image_config


@dataclass(frozen=True)
class ImageInfo:
    """id: the engine's handle; config_digest: SHA-256 of its configuration ("sha256:..."), the same on all engines;
    diff_ids: layers from the lowest; layers: chain id -> bytes, None where the history has not one entry for each;
    tagged: when it was last tagged (ISO 8601, UTC), None when not known; size: bytes.
    """

    id: str
    config_digest: str
    tags: tuple[str, ...]
    diff_ids: tuple[str, ...]
    layers: Mapping[str, int] | None
    tagged: str | None = field(compare=False)
    size: int
    os: str
    architecture: str
    config: Mapping[str, Any]

    @classmethod
    def of(cls, found: Mapping[str, Any], history: Sequence[Mapping[str, Any]], *, keeps_layers: bool) -> ImageInfo:
        """found: as the engine describes it; history: from the lowest layer; keeps_layers: see `Engine`.

        Where containerd keeps the images their Id is not the configuration's digest: there it is worked out for images
        with the dates and the history that sealing gives, and others have their Id in its place.
        """
        diff_ids = tuple(found["RootFS"].get("Layers") or ())
        sizes = [event["Size"] for event in history]
        tagged = found.get("Metadata", {}).get("LastTagTime") or ""
        image = cls(
            id=found["Id"],
            config_digest=found["Id"],
            tags=tuple(sorted(tag for tag in found.get("RepoTags") or () if tag != "<none>:<none>")),
            diff_ids=diff_ids,
            layers=dict(zip(chain_ids(diff_ids), sizes, strict=True)) if len(sizes) == len(diff_ids) else None,
            tagged=None if not tagged or tagged.startswith("0001-") else tagged,
            size=found["Size"],
            os=found["Os"],
            architecture=found["Architecture"],
            config=found.get("Config") or {},
        )
        authors = [event["CreatedBy"] for event in history]
        if keeps_layers or found.get("Created") != CREATED or authors != [CREATED_BY] * len(diff_ids):
            return image
        return replace(image, config_digest=digest_of(image.canonical))

    @cached_property  # sizes of many images ask each for it many times
    def chains(self) -> list[str]:
        return chain_ids(self.diff_ids)

    @property
    def labels(self) -> Mapping[str, str]:
        return self.config.get("Labels") or {}

    @property
    def canonical(self) -> bytes:
        """Its configuration, as sealing writes it."""
        return image_config(self.config, os=self.os, architecture=self.architecture, diff_ids=self.diff_ids)

    def unique_size(self, images: Iterable[ImageInfo]) -> int | None:
        """Bytes of the layers that no other image of the engine has; None where the sizes are not known."""
        if self.layers is None:
            return None
        shared = {chain for other in images if other.id != self.id for chain in other.chains}
        return sum(size for chain, size in self.layers.items() if chain not in shared)


def chain_ids(diff_ids: Iterable[str]) -> list[str]:
    """Identity of each layer together with all below it (OCI image specification, "Layer ChainID")."""
    return list(accumulate(diff_ids, lambda below, one: f"sha256:{sha256(f'{below} {one}'.encode()).hexdigest()}"))


def is_below(lower: tuple[str, ...], upper: tuple[str, ...]) -> bool:
    """Whether an image with the layers `upper` stands on, or is, the one with the layers `lower`."""
    return bool(lower) and upper[: len(lower)] == lower
