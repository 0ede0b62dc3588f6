"""What images cost on the engine's disk: bytes per layer, and which layers are shared.

The engine's own answer (`docker system df -v`) also walks every volume and container and takes seconds to minutes on
a used machine; the sizes in the images' histories take milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate
from typing import Any

from docker.errors import ImageNotFound

from sparkpin.host.engine import Engine, engine_errors


@dataclass(frozen=True)
class EngineImage:
    """An image as the engine holds it.

    id: the engine's handle; config_digest: the same on all engines; diff_ids: layers from the lowest; layers: chain id
    -> bytes, None where the history has not one entry for each; tagged: when it was last tagged (ISO 8601, UTC),
    None when not known.
    """

    id: str
    config_digest: str
    tags: tuple[str, ...]
    diff_ids: tuple[str, ...]
    layers: dict[str, int] | None
    tagged: str | None


def chain_ids(diff_ids: Iterable[str]) -> list[str]:
    """Identity of each layer together with all below it (OCI image specification, "Layer ChainID")."""
    return list(accumulate(diff_ids, lambda below, one: f"sha256:{sha256(f'{below} {one}'.encode()).hexdigest()}"))


def inventory(engine: Engine) -> list[EngineImage]:
    """Every image of the engine, other people's included: layers may be shared with them."""
    with engine_errors():
        ids = dict.fromkeys(entry["Id"] for entry in engine.client.api.images())
    return [image for image_id in ids if (image := engine_image(engine, image_id))]


def engine_image(engine: Engine, image_id: str) -> EngineImage | None:
    """None for an image that was removed since the list was made."""
    api: Any = engine.client.api
    with engine_errors():
        try:
            details, history = api.inspect_image(image_id), api.history(image_id)
        except ImageNotFound:
            return None
    known = engine.image(image_id) if not engine.keeps_layers else None
    diff_ids = tuple(details["RootFS"].get("Layers") or ())
    sizes = [item["Size"] for item in reversed(history)]  # with an entry for each layer in what we sealed
    tagged = details.get("Metadata", {}).get("LastTagTime") or ""
    return EngineImage(
        id=image_id,
        config_digest=known.config_digest if known else image_id,
        tags=tuple(sorted(tag for tag in details.get("RepoTags") or () if tag != "<none>:<none>")),
        diff_ids=diff_ids,
        layers=dict(zip(chain_ids(diff_ids), sizes, strict=True)) if len(sizes) == len(diff_ids) else None,
        tagged=None if not tagged or tagged.startswith("0001-") else tagged,
    )


def all_layers(images: Iterable[EngineImage]) -> dict[str, int]:
    return {chain: size for image in images for chain, size in (image.layers or {}).items()}


def unique_size(image: EngineImage, images: Iterable[EngineImage]) -> int | None:
    """Bytes of the layers that no other image of the engine has; None where the sizes are not known."""
    if image.layers is None:
        return None
    shared = {chain for other in images if other.id != image.id for chain in chain_ids(other.diff_ids)}
    return sum(size for chain, size in image.layers.items() if chain not in shared)


def is_below(lower: tuple[str, ...], upper: tuple[str, ...]) -> bool:
    """Whether an image with the layers `upper` stands on, or is, the one with the layers `lower`."""
    return bool(lower) and upper[: len(lower)] == lower
