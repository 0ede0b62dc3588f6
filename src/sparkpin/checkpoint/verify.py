"""Is a checkpoint what its plan says? Every tensor against its source, byte by byte; nothing missing, nothing extra."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparkpin.checkpoint.content import OWN, REBUILD, bad
from sparkpin.checkpoint.copying import RangeReader
from sparkpin.checkpoint.formats import SCALE, WEIGHT
from sparkpin.checkpoint.int8_head import Computed
from sparkpin.checkpoint.layout import Shard, in_order
from sparkpin.checkpoint.plan import CheckpointPlan
from sparkpin.checkpoint.repository import CONFIG, INDEX, Places, ReadRepository, listing_of, read_repository
from sparkpin.checkpoint.safetensors import read_header, read_header_bytes


def verify_checkpoint(folder: Path, places: Places, plan: CheckpointPlan) -> dict[str, str]:
    """Compare all bytes of a built checkpoint with its inputs; gives the SHA-256 (hex) of each shard.

    Raises CheckpointError naming the first file or tensor that differs. sparkpin.json is not read: `verify_built` does.
    """
    check_files(folder, plan)
    check_consistent(folder, plan)
    with RangeReader() as ours, RangeReader() as theirs:
        for link in plan.links:
            same_file(ours, theirs, folder / link.path, places.linked(link.path, link.of or plan.base))
        return {
            shard.path: same_shard(ours, theirs, folder / shard.path, shard, plan.base, places) for shard in plan.shards
        }


def same_file(ours: RangeReader, theirs: RangeReader, path: Path, source: Path) -> None:
    if path.samefile(source):
        return
    sizes = path.stat().st_size, source.stat().st_size
    if sizes[0] != sizes[1]:
        raise bad(path, f"{sizes[0]} bytes, wanted {sizes[1]} as in {source}")
    pairs = zip(ours.chunks(path, 0, sizes[0]), theirs.chunks(source, 0, sizes[1]), strict=True)
    if any(differ(mine, other) for mine, other in pairs):
        raise bad(path, f"its bytes are not those of {source}")


def same_shard(ours: RangeReader, theirs: RangeReader, path: Path, shard: Shard, base: str, places: Places) -> str:
    """SHA-256 (hex) of a shard that is what it should be."""
    sources = in_order(shard, read_header(places.folders[base] / shard.path) if shard.in_base else None, base)
    if read_header_bytes(path) != shard.header:
        raise bad(path, "its header is not the planned one")
    digest = hashlib.sha256(shard.header)
    position = len(shard.header)
    computed = Computed(places)
    for source in sources:
        end = position + source.info.nbytes
        if source.of:
            for wanted in computed.chunks(source):
                for chunk in ours.chunks(path, position, position + len(wanted)):
                    if differ(chunk, wanted[: len(chunk)]):
                        raise bad(path, f"the bytes of tensor {source.info.name!r} are not those computed anew")
                    digest.update(chunk)
                    position, wanted = position + len(chunk), wanted[len(chunk) :]
            continue
        origin, begin = places.of(source)
        mine = ours.chunks(path, position, end)
        other = theirs.chunks(origin, begin, begin + source.info.nbytes)
        for chunk, wanted in zip(mine, other, strict=True):
            if differ(chunk, wanted):
                raise bad(path, f"the bytes of tensor {source.info.name!r} are not those in {origin}")
            digest.update(chunk)
        position = end
    return digest.hexdigest()


def differ(mine: memoryview, other: memoryview) -> bool:
    """A bytearray is compared at once, two memoryviews item by item."""
    return bytearray(mine) != other


def check_files(folder: Path, plan: CheckpointPlan) -> None:
    """Cheap: files, their sizes, index and config are the planned ones. Raises CheckpointError."""
    wanted = set(plan.paths)
    seen = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - set(OWN)
    if seen != wanted:
        raise bad(folder, f"missing files: {sorted(wanted - seen)}, extra files: {sorted(seen - wanted)}")
    linked = ((link.path, link.size) for link in plan.links)
    for path, size in (*linked, *((shard.path, shard.size) for shard in plan.shards)):
        if (found := (folder / path).stat().st_size) != size:
            raise bad(folder / path, f"{found} bytes, wanted {size}")
    for text in plan.texts:
        if (folder / text.path).read_bytes() != text.data:
            raise bad(folder / text.path, "its text is not the planned one")


def check_consistent(folder: Path, plan: CheckpointPlan) -> None:
    """Headers, index and config of the result fit each other, read afresh as a loader would."""
    result = read_repository(replace(listing_of("result", folder), mend=REBUILD))
    if result.unlisted.keys() != plan.unlisted:
        raise bad(folder / INDEX, "it does not list what the plan lists")
    if any(text.path == INDEX for text in plan.texts):
        total = result.listed_bytes
        metadata = (result.index or {}).get("metadata", {})
        if metadata.get("total_size") != total:
            raise bad(folder / INDEX, f"metadata.total_size: saw {metadata.get('total_size')}, wanted {total}")
    if "hybrid" in plan.steps:
        check_fp8_entries(folder, result)


def check_fp8_entries(folder: Path, result: ReadRepository) -> None:
    """An FP8 weight has a scale and an FP8 entry in extra_config; an entry and a scale have an FP8 weight."""
    config: Mapping[str, Any] = result.config.get("quantization_config", {}).get("extra_config", {})
    entries = {name for name, entry in config.items() if entry.get("data_type") == "fp" and entry.get("bits") == 8}
    weights, scales = set(), set()
    for source in result.sources():
        module, _, part = source.info.name.rpartition(".")
        if part == SCALE:
            scales.add(module)
        elif part == WEIGHT and source.info.dtype == "F8_E4M3":
            weights.add(module)
    if not entries == weights == scales:
        odd = sorted((entries | weights | scales) - (entries & weights & scales))
        where = ", ".join(
            f"{what}: {'yes' if odd[0] in group else 'no'}"
            for what, group in (("entry in extra_config", entries), ("FP8 weight", weights), ("scale", scales))
        )
        raise bad(folder / CONFIG, f"{len(odd)} modules are half FP8, first {odd[0]!r} ({where})")
