"""Is a checkpoint what its plan says? Every tensor against its source, byte by byte; nothing missing, nothing extra."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from sparkpin.checkpoint.content import OWN, REBUILD, bad
from sparkpin.checkpoint.draft import Shard
from sparkpin.checkpoint.formats import SCALE, WEIGHT
from sparkpin.checkpoint.plan import CheckpointPlan
from sparkpin.checkpoint.repository import CONFIG, INDEX, Places, header_of, listing_of, read_repository
from sparkpin.checkpoint.safetensors import read_header, read_header_bytes
from sparkpin.core.files import CHUNK


def verify_checkpoint(folder: Path, places: Places, plan: CheckpointPlan) -> dict[str, str]:
    """Compare all bytes of a built checkpoint with its inputs; gives the SHA-256 (hex) of each shard.

    Raises CheckpointError naming the first file or tensor that differs. sparkpin.json is not read: `verify_built` does.
    """
    check_files(folder, plan)
    check_consistent(folder, plan)
    for link in plan.links:
        path, source = folder / link.path, places.linked(link.path, link.of or plan.base)
        if not path.samefile(source) and any(mine != other for mine, other in pairs(path, 0, source, 0, link.size)):
            raise bad(path, f"its bytes are not those of {source}")
    return {shard.path: verify_shard(folder / shard.path, shard, plan.base, places) for shard in plan.shards}


def verify_shard(path: Path, shard: Shard, base: str, places: Places) -> str:
    """SHA-256 (hex) of a shard that is what it should be."""
    sources = shard.in_order(read_header(places.folders[base] / shard.path) if shard.in_base else None, base)
    if read_header_bytes(path) != shard.header:
        raise bad(path, "its header is not the planned one")
    digest, position = hashlib.sha256(shard.header), len(shard.header)
    for place in sources:
        origin, begin = places.of(place)
        for mine, other in pairs(path, position, origin, begin, place.info.nbytes):
            if mine != other:
                raise bad(path, f"the bytes of tensor {place.info.name!r} are not those in {origin}")
            digest.update(mine)
        position += place.info.nbytes
    return digest.hexdigest()


def pairs(path: Path, at: int, source: Path, begin: int, length: int) -> Iterator[tuple[bytes, bytes]]:
    """What two files have at places of theirs, in chunks; fewer bytes where one ends."""
    with path.open("rb", buffering=0) as mine, source.open("rb", buffering=0) as other:
        mine.seek(at)
        other.seek(begin)
        for done in range(0, length, CHUNK):
            yield mine.read(min(CHUNK, length - done)), other.read(min(CHUNK, length - done))


def check_files(folder: Path, plan: CheckpointPlan) -> None:
    """Cheap: files, their sizes, index and config are the planned ones. Raises CheckpointError."""
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    found = {(name, size) for name, size in sizes.items() if name not in OWN}
    for name, _ in sorted(found ^ set(plan.sizes.items())):
        got, expected = (f"{one[name]} bytes" if name in one else "no such file" for one in (sizes, plan.sizes))
        raise bad(folder / name, f"got {got}, expected {expected}")
    for text in plan.texts:
        if (folder / text.path).read_bytes() != text.data:
            raise bad(folder / text.path, "its text is not the planned one")


def check_consistent(folder: Path, plan: CheckpointPlan) -> None:
    """Headers, index and config of the result fit each other, read again as a loader would."""
    listing = replace(listing_of("result", folder), mend=REBUILD)
    result = read_repository(listing)
    if result.unlisted.keys() != plan.unlisted:
        raise bad(folder / INDEX, "it does not list what the plan lists")
    total = ((result.index or {}).get("metadata") or {}).get("total_size")
    if any(text.path == INDEX for text in plan.texts) and total != result.listed_bytes:
        raise bad(folder / INDEX, f"metadata.total_size: got {total}, expected {result.listed_bytes}")
    if "hybrid" not in plan.steps:
        return
    # An FP8 weight has a scale and an FP8 entry in extra_config; an entry and a scale have an FP8 weight.
    config = result.config.get("quantization_config", {}).get("extra_config", {})
    entries = {name for name, entry in config.items() if entry.get("data_type") == "fp" and entry.get("bits") == 8}
    infos = [info for file in listing.headers for info in header_of(listing, file).tensors.values()]
    scales = {info.name.removesuffix(f".{SCALE}") for info in infos if info.name.endswith(f".{SCALE}")}
    fp8 = (info.name for info in infos if info.dtype == "F8_E4M3" and info.name.endswith(f".{WEIGHT}"))
    weights = {name.removesuffix(f".{WEIGHT}") for name in fp8}
    if odd := sorted((entries | weights | scales) - (entries & weights & scales)):
        groups = {"an entry in extra_config": entries, "an FP8 weight": weights, "a scale": scales}
        got = [what for what, group in groups.items() if odd[0] in group]
        cause = f"{len(odd)} modules are half FP8; {odd[0]}: got {' and '.join(got)}, expected {', '.join(groups)}"
        raise bad(folder / CONFIG, cause)
