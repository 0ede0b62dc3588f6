"""Is a checkpoint what its plan says? Every tensor against its source, byte by byte; nothing missing, nothing extra."""

from __future__ import annotations

import hashlib
from pathlib import Path

from sparkpin.checkpoint.content import OWN, bad
from sparkpin.checkpoint.draft import Shard
from sparkpin.checkpoint.plan import CheckpointPlan
from sparkpin.checkpoint.repository import Places
from sparkpin.core.files import sha256_file


def verify_checkpoint(folder: Path, places: Places, plan: CheckpointPlan) -> dict[str, str]:
    """Compare all bytes of a built checkpoint with its inputs; gives the SHA-256 (hex) of each shard.

    Raises CheckpointError naming the first file that differs. sparkpin.json is not read: `verify_built` does.
    """
    check_files(folder, plan)
    for link in plan.links:
        path, source = folder / link.path, places.linked(link.path, link.of or plan.base)
        if not path.samefile(source) and sha256_file(path) != sha256_file(source):
            raise bad(path, f"its bytes are not those of {source}")
    return {shard.path: verify_shard(folder / shard.path, shard, places) for shard in plan.shards}


def verify_shard(path: Path, shard: Shard, places: Places) -> str:
    """SHA-256 (hex) of a shard that is what it should be."""
    digest = hashlib.sha256(shard.header)
    for span in shard.spans:
        for chunk in places.of(*span).chunks():
            digest.update(chunk)
    if (sha256 := digest.hexdigest()) != sha256_file(path)[0]:
        raise bad(path, "its bytes are not those of the tensors that the plan has for it")
    return sha256


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
