"""The layout of the real INT4 and FP8 pair: tensors by name, and the files of a repository."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from sparkpin.checkpoint.repository import INDEX
from sparkpin.checkpoint.safetensors import TensorSource, write_file
from sparkpin.core.files import atomic_folder, write_json

GROUP = 128
"""INT4 group and FP8 block size."""
FP8_MAX = 448.0
BODY = "model.language_model."
EXTRA_FILE = "model_extra_tensors.safetensors"
SHARDS = 2
LAYER = re.compile(r"model\.(?:language_model\.)?layers\.(\d+)\.")


class Plain(NamedTuple):
    """A tensor as a repository holds it, ready to write."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


Tensors = Mapping[str, Plain]


def int4_parts(name: str, n: int, k: int, words: bytes, scales: bytes) -> dict[str, Plain]:
    """The tensors of such a weight."""
    stem = name.removesuffix("weight")
    return {
        f"{stem}qweight": Plain("I32", (k // 8, n), words),
        f"{stem}qzeros": Plain("I32", (k // GROUP, n // 8), b"\x77" * (k // GROUP * n // 2)),
        f"{stem}scales": Plain("F16", (k // GROUP, n), scales),
    }


def fp8_parts(name: str, n: int, k: int, weight: bytes, scales: bytes) -> dict[str, Plain]:
    """The tensors of such a weight; the last blocks may be smaller."""
    shape = (-(-n // GROUP), -(-k // GROUP))
    return {name: Plain("F8_E4M3", (n, k), weight), f"{name}_scale_inv": Plain("BF16", shape, scales)}


def write_repository(
    folder: Path, texts: Mapping[str, bytes], tensors: Tensors, layers: int, extra: Tensors | None = None
) -> None:
    """A folder that is there is replaced. extra: of the file that the index does not list."""
    shutil.rmtree(folder, ignore_errors=True)
    weight_map = dict[str, str]()
    with atomic_folder(folder) as partial:
        for name, data in texts.items():
            (partial / name).write_bytes(data)
        for number in range(SHARDS):
            shard = {name: tensor for name, tensor in tensors.items() if shard_of(name, layers) == number}
            file = f"model-{number + 1:05}-of-{SHARDS:05}.safetensors"
            write_tensors(partial / file, shard)
            weight_map |= dict.fromkeys(shard, file)
        total = sum(len(tensor.data) for tensor in tensors.values())
        write_json(partial / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        if extra:
            write_tensors(partial / EXTRA_FILE, extra)


def shard_of(name: str, layers: int) -> int:
    """Layers in order; what has no layer number (head, final norm, MTP) comes last, the embedding and `fc` first."""
    if match := LAYER.match(name):
        return int(match[1]) * SHARDS // layers
    return 0 if "embed_tokens" in name or name.startswith("fc.") else SHARDS - 1


def write_tensors(path: Path, tensors: Tensors) -> None:
    rows = (TensorSource(name, tensor.dtype, tensor.shape, (tensor.data,)) for name, tensor in tensors.items())
    write_file(path, rows, {"format": "pt"})


def is_int4(name: str) -> bool:
    """Whether AutoRound quantises this linear layer: attention and routed experts of the body."""
    return name.startswith(BODY) and ".shared_expert." not in name
