"""What a checkpoint's tensors are, by kind, and the bytes that a server holds of them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from sparkpin.checkpoint.safetensors import TensorInfo
from sparkpin.memory.geometry import Geometry
from sparkpin.memory.settings import Settings

INT4 = ("qweight", "qzeros", "scales", "g_idx")
FP8 = ("F8_E4M3", "F8_E5M2")
HEAD, MTP, VISION, DRAFTER, EMBEDDINGS = "LM head", "MTP layer", "vision tower", "drafter", "embeddings"
KINDS = (
    "INT4 experts", "INT4 layers", "FP4 experts", "FP4 layers", "FP8 experts", "FP8 layers",
    "16-bit experts", "16-bit layers", "32-bit layers", EMBEDDINGS, HEAD, MTP, VISION, DRAFTER,
)  # fmt: skip
"""In the order of a table."""
# A second model's names begin with its folder.
BY_NAME = {".drafter/": DRAFTER, ".mtp.": MTP, ".visual.": VISION, "embed_tokens": EMBEDDINGS, "lm_head": HEAD}

# vLLM 0.33, model_executor: models/qwen3_next.py, qwen3_5_mtp.py, qwen3_vl.py. in_proj_a and in_proj_b of AutoRound,
# GPTQ and AWQ on CUDA, whose kernel takes no narrow parts: layers/mamba/gdn/qwen_gdn_linear_attn.py, maybe_disable_tp.
WHOLE = re.compile(r"norm|\.mlp\.gate\.|\.shared_expert_gate\.|\.patch_embed\.|\.pos_embed\.")
WHOLE_ON_CUDA = re.compile(r"\.in_proj_[ab]\.")
KEYS = re.compile(r"\.self_attn\.[kv]_proj\.")


@dataclass(frozen=True, slots=True)
class Loading:
    """How a server loads a checkpoint.

    draft: with the MTP drafter, which shares embeddings and LM head with the model (vLLM 0.32, v1/spec_decode/
    llm_base_proposer.py). vision: with the vision tower. int8_head: the mod int8-lm-head quantises the LM head.
    widened: INT4 experts and FP8 layers are expanded to 16 bits, as the mods do on a CPU. ranks: tensor-parallel
    machines or GPUs. draft_rows: rows of the LM head that the mod draft-vocabulary copies, 0: none; draft_bits: of a
    weight in them, 8 where the head's own form is kept. kv_heads: of a layer, where that may be fewer than ranks.
    """

    draft: bool
    vision: bool
    int8_head: bool
    widened: bool
    ranks: int = 1
    draft_rows: int = 0
    draft_bits: int = 8
    kv_heads: int | None = None

    @classmethod
    def of(cls, settings: Settings, geometry: Geometry, mods: Collection[str]) -> Loading:
        """mods: of the chain of stages."""
        return cls(
            draft=settings.draft_layers > 0,
            vision=not settings.text_only,
            int8_head="int8-lm-head" in mods,
            widened=settings.platform == "cpu",
            ranks=settings.ranks,
            draft_rows=settings.draft_rows if "draft-vocabulary" in mods else 0,
            draft_bits=settings.draft_bits,
            kv_heads=geometry.kv_heads,
        )


@dataclass(frozen=True, slots=True)
class WeightKind:
    """One kind. stored: bytes in the checkpoint; held: bytes in the memory of one machine.

    whole: of `held`, what every machine has alike, as it is not divided.
    """

    kind: str
    tensors: int
    stored: int
    held: int
    whole: int


def weigh(tensors: Iterable[TensorInfo], loading: Loading) -> list[WeightKind]:
    """A checkpoint's tensors by kind."""
    counts: dict[str, list[int]] = {}
    for info in tensors:
        kind = kind_of(info)
        row = counts.setdefault(kind, [0, 0, 0, 0])
        held, parts = held_bytes(info, kind, loading) + copied_bytes(info, kind, loading), parts_of(info, loading)
        whole = held if parts == 1 < loading.ranks else 0
        for at, more in enumerate((1, info.nbytes, -(-held // parts), whole)):
            row[at] += more
    return [WeightKind(kind, *counts[kind]) for kind in KINDS if kind in counts]


def parts_of(info: TensorInfo, loading: Loading) -> int:
    """How many different parts of a tensor the ranks hold: one each, or fewer where some hold the same.

    Embeddings and LM head are divided by rows (model_executor/layers/vocab_parallel_embedding.py), projections and
    experts by their heads or width with the scales that belong to them, keys and values by KV heads
    (model_executor/layers/linear.py, QKVParallelLinear).
    """
    name = f".{info.name}"
    if WHOLE.search(name) or (WHOLE_ON_CUDA.search(name) and not loading.widened):
        return 1
    if loading.kv_heads and KEYS.search(name):
        return min(loading.ranks, loading.kv_heads)
    return loading.ranks


def kind_of(info: TensorInfo) -> str:
    """By the tensor's name and type: INT4 as AutoRound and GPTQ name it, FP8 as Qwen, FP4 as ModelOpt."""
    name, part = f".{info.name}", info.name.rpartition(".")[2]
    if kind := next((kind for piece, kind in BY_NAME.items() if piece in name), None):
        return kind
    place = "experts" if ".experts." in name else "layers"
    if part in INT4:
        return f"INT4 {place}"
    scale_of_fp4 = part in ("weight_scale_2", "input_scale") or (part == "weight_scale" and info.dtype in FP8)
    if info.dtype == "U8" or scale_of_fp4:
        return f"FP4 {place}"
    if info.dtype in FP8 or part.startswith("weight_scale"):
        return f"FP8 {place}"
    return "32-bit layers" if place == "layers" and info.dtype in ("F32", "I32") else f"16-bit {place}"


def held_bytes(info: TensorInfo, kind: str, loading: Loading) -> int:
    if (kind == MTP and not loading.draft) or (kind == VISION and not loading.vision):
        return 0
    if (kind == HEAD or info.name.endswith("/lm_head.weight")) and loading.int8_head and len(info.shape) == 2:
        # mods/int8-lm-head: codes in rows of whole 64 columns, a 16-bit scale for each row and column, which a
        # checkpoint that holds the codes has as tensors of their own.
        rows, columns = info.shape
        return rows * (-(-columns // 64) * 64) + (0 if info.dtype == "I8" else 2 * (rows + columns))
    if loading.widened and kind == "INT4 experts":
        return info.nbytes * 4 if info.name.endswith(".qweight") else 0  # eight codes in each int32
    if loading.widened and kind == "FP8 layers":
        return info.nbytes * 2 if info.name.endswith(".weight") else 0
    return info.nbytes


def copied_bytes(info: TensorInfo, kind: str, loading: Loading) -> int:
    """Rows that a drafter has of its own; scales of columns, in one dimension, are shared.

    Those of 4 bits are packed as int8-lm-head's `int4` says on a GPU, with scales of 32 bits; on a CPU they are as the
    head's.
    """
    if kind != HEAD or not loading.draft_rows or len(info.shape) != 2:
        return 0
    rows = info.shape[0]
    if loading.draft_bits == 4 and not loading.widened:
        return min(loading.draft_rows, rows) * (-(-info.shape[1] // 32) * 16 + 4)
    return held_bytes(info, kind, loading) * min(loading.draft_rows, rows) // rows
