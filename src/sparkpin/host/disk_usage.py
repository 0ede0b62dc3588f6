"""What images cost on the engine's disk: bytes per layer, and which layers are shared.

The engine's own answer (`docker system df -v`) also walks every volume and container and takes seconds to minutes on
a used machine; the sizes in the images' histories take milliseconds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sparkpin.core.errors import EngineError
from sparkpin.host.engine import Engine, engine_errors

Layers = dict[str, int]  # chain id -> bytes


@dataclass(frozen=True)
class EngineImage:
    """An image as the engine holds it.

    id: the engine's handle; config_digest: the same on all engines; diff_ids: layers from the lowest; layers: chain id
    -> bytes, None where the history does not tell the layers' sizes; tagged: when it was last tagged (ISO 8601, UTC),
    None when not known.
    """

    id: str
    config_digest: str
    tags: tuple[str, ...]
    diff_ids: tuple[str, ...]
    layers: Layers | None
    tagged: str | None


def chain_ids(diff_ids: Iterable[str]) -> list[str]:
    """Identity of each layer together with all below it (OCI image specification, "Layer ChainID")."""
    chain: list[str] = []
    for diff_id in diff_ids:
        text = f"{chain[-1]} {diff_id}" if chain else ""
        chain.append("sha256:" + hashlib.sha256(text.encode()).hexdigest() if text else diff_id)
    return chain


def layer_sizes(history: list[int], count: int) -> list[int] | None:
    """Bytes of `count` layers from the history's entries (lowest first), which may hold entries without a layer.

    Entries without a layer have size 0; where a layer of 0 bytes makes that ambiguous the answer is None.
    """
    if len(history) == count:
        return history
    filled = [size for size in history if size]
    return filled if len(filled) == count else None


def inventory(engine: Engine) -> list[EngineImage]:
    """Every image of the engine, other people's included: layers may be shared with them."""
    api: Any = engine.client.api
    found = []
    with engine_errors():
        ids = dict.fromkeys(entry["Id"] for entry in api.images())
    for image_id in ids:
        try:
            with engine_errors():
                details, history = api.inspect_image(image_id), api.history(image_id)
            known = engine.image(image_id) if not engine.keeps_layers else None
        except EngineError:
            if engine.image(image_id) is None:  # removed since the list was made
                continue
            raise
        diff_ids = tuple(details["RootFS"].get("Layers") or ())
        history = [item["Size"] for item in reversed(history)]
        sizes = layer_sizes(history, len(diff_ids))
        tagged = details.get("Metadata", {}).get("LastTagTime") or ""
        found.append(
            EngineImage(
                id=image_id,
                config_digest=known.config_digest if known else image_id,
                tags=tuple(sorted(tag for tag in details.get("RepoTags") or () if tag != "<none>:<none>")),
                diff_ids=diff_ids,
                layers=dict(zip(chain_ids(diff_ids), sizes, strict=True)) if sizes is not None else None,
                tagged=None if not tagged or tagged.startswith("0001-") else tagged,
            )
        )
    return found


def clear_build_cache(engine: Engine) -> tuple[int, int]:
    """Of everybody's builds, for a record does not tell whose it is; what builds use at the moment stays. How many
    records went, and their bytes."""
    with engine_errors():
        answer = engine.client.api.prune_builds(all=True)
    return len(answer.get("CachesDeleted") or ()), int(answer["SpaceReclaimed"])


def all_layers(images: Iterable[EngineImage]) -> Layers:
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
