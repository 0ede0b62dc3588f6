"""Is a checkpoint what its plan says? Every tensor against its source, byte by byte; nothing missing, nothing extra."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from sparkpin.checkpoint.hybrid import SCALE, WEIGHT
from sparkpin.checkpoint.plan import Plan, Shard
from sparkpin.checkpoint.repository import CONFIG, INDEX, Repository, read_json, read_repository
from sparkpin.checkpoint.safetensors import read_header
from sparkpin.errors import CheckpointError, IntegrityError

RECORD = "sparkpin.json"
CHUNK = 1 << 20
REBUILD = "delete this folder and run `invoke checkpoint`, which builds it again"


class Reader:
    """Reads ranges of files through one buffer and keeps the files open. A chunk lives until the next one."""

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}
        self._buffer = bytearray(CHUNK)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def chunks(self, path: Path, begin: int, end: int) -> Iterator[memoryview]:
        """Bytes `begin` to `end` of a file. Raises IntegrityError if the file ends before."""
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        view = memoryview(self._buffer)
        while begin < end:
            got = os.preadv(self._files[path], [view[: min(CHUNK, end - begin)]], begin)
            if got == 0:
                raise IntegrityError(f"{path}: ends at byte {begin}, wanted {end}", next_step="invoke fetch")
            yield view[:got]
            begin += got


def verify_checkpoint(folder: Path, folders: Mapping[str, Path], plan: Plan) -> None:
    """Compare a built checkpoint with its inputs. Raises CheckpointError naming the first file or tensor that differs.

    folder: the checkpoint; folders: repository's name in the pin -> its folder; plan: made from the same folders.
    """
    wanted = set(plan.paths)
    seen = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {RECORD}
    if seen != wanted:
        raise bad(folder, f"missing files: {sorted(wanted - seen)}, extra files: {sorted(seen - wanted)}")
    with Reader() as ours, Reader() as theirs:
        for link in plan.links:
            same_file(ours, theirs, folder / link.path, folders[plan.base] / link.path)
        for text in plan.texts:
            if (folder / text.path).read_bytes() != text.data:
                raise bad(folder / text.path, "its text is not the planned one")
        for shard in plan.shards:
            same_tensors(ours, theirs, folder / shard.path, shard, folders)
    check_consistent(folder, plan)


def same_file(ours: Reader, theirs: Reader, path: Path, source: Path) -> None:
    if path.samefile(source):
        return
    sizes = path.stat().st_size, source.stat().st_size
    if sizes[0] != sizes[1]:
        raise bad(path, f"{sizes[0]} bytes, wanted {sizes[1]} as in {source}")
    pairs = zip(ours.chunks(path, 0, sizes[0]), theirs.chunks(source, 0, sizes[1]), strict=True)
    if any(differ(mine, other) for mine, other in pairs):
        raise bad(path, f"its bytes are not those of {source}")


def same_tensors(ours: Reader, theirs: Reader, path: Path, shard: Shard, folders: Mapping[str, Path]) -> None:
    header = read_header(path)
    missing, extra = set(shard.tensors) - set(header.tensors), set(header.tensors) - set(shard.tensors)
    if missing or extra:
        raise bad(path, f"missing tensors: {sorted(missing)[:3]}, extra tensors: {sorted(extra)[:3]}")
    if dict(header.metadata) != dict(shard.metadata):
        raise bad(path, f"metadata {dict(header.metadata)}, wanted {dict(shard.metadata)}")
    for name, info in header.tensors.items():
        source = shard.tensors[name]
        if (info.dtype, info.shape) != (source.info.dtype, source.info.shape):
            wanted = f"{source.info.dtype} {list(source.info.shape)}"
            raise bad(path, f"tensor {name!r} is {info.dtype} {list(info.shape)}, wanted {wanted}")
        origin = folders[source.repository] / source.file
        mine = ours.chunks(path, info.begin, info.end)
        other = theirs.chunks(origin, source.info.begin, source.info.end)
        if any(differ(a, b) for a, b in zip(mine, other, strict=True)):
            raise bad(path, f"the bytes of tensor {name!r} are not those in {origin}")


def differ(mine: memoryview, other: memoryview) -> bool:
    """A bytearray is compared at once, two memoryviews item by item."""
    return bytearray(mine) != other


def check_consistent(folder: Path, plan: Plan) -> None:
    """Index, config and tensors of the result fit each other, read afresh as a loader would."""
    result = read_repository("result", folder)
    if dict(result.weight_map) != dict(plan.weight_map):
        raise bad(folder / INDEX, "weight_map is not the planned one")
    if len(plan.texts) and any(text.path == INDEX for text in plan.texts):
        total = sum(result.tensors[name].info.nbytes for name in result.weight_map)
        seen = read_json(folder / INDEX).get("metadata", {}).get("total_size")
        if seen != total:
            raise bad(folder / INDEX, f"metadata.total_size: saw {seen}, wanted {total}")
    if "hybrid" in plan.steps:
        check_fp8_entries(folder, result)


def check_fp8_entries(folder: Path, result: Repository) -> None:
    """An FP8 weight has a scale and an FP8 entry in extra_config; an entry and a scale have an FP8 weight."""
    config: Mapping[str, Any] = result.config.get("quantization_config", {}).get("extra_config", {})
    entries = {name for name, entry in config.items() if entry.get("data_type") == "fp" and entry.get("bits") == 8}
    weights = {n.removesuffix(WEIGHT) for n, t in result.tensors.items() if t.info.dtype == "F8_E4M3"}
    scales = {name.removesuffix(SCALE) for name in result.tensors if name.endswith(SCALE)}
    if not entries == weights == scales:
        odd = sorted((entries | weights | scales) - (entries & weights & scales))
        where = ", ".join(
            f"{what}: {'yes' if odd[0] in group else 'no'}"
            for what, group in (("entry in extra_config", entries), ("FP8 weight", weights), ("scale", scales))
        )
        raise bad(folder / CONFIG, f"{len(odd)} modules are half FP8, first {odd[0]!r} ({where})")


def bad(path: Path, cause: str) -> CheckpointError:
    return CheckpointError(f"{path}: {cause}", next_step=REBUILD)
