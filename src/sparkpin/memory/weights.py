"""What a checkpoint's tensors are, by kind, and the bytes that a server loads of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from sparkpin.checkpoint.safetensors import TensorInfo
from sparkpin.memory.geometry import RULES, Geometry
from sparkpin.memory.settings import Settings

HEAD, MTP, MTP_EXPERTS, EMBEDDINGS = "LM head", "MTP layer", "MTP experts", "embeddings"
VISION, DRAFTER, TABLES = "vision tower", "drafter", "n-gram tables"
LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class WeightKind:
    """One kind. stored: bytes in the checkpoint; loaded: bytes in the memory of one machine; read: of them, what a pass
    over all of it reads."""

    kind: str
    tensors: int
    stored: int
    loaded: int
    read: int


def alike(tensors: Iterable[TensorInfo], layers: int) -> Counter[TensorInfo]:
    """Tensors that differ in their layer alone, and how many there are: a checkpoint can have 100,000. What lies behind
    the model's `layers` is its MTP layer, as in DeepSeek's and GLM's files."""

    def place(found: re.Match[str]) -> str:
        return ".0." if int(found[1]) < layers else ".mtp."

    return Counter(
        TensorInfo(LAYER.sub(place, name, count=1), dtype, shape, 0, end - begin)
        for name, dtype, shape, begin, end in tensors
    )


def weigh(
    tensors: Mapping[TensorInfo, int], geometry: Geometry, settings: Settings, *, symmetric: bool = False
) -> list[WeightKind]:
    """A checkpoint's tensors (see `alike`) by kind. symmetric: INT4 codes have no zero points of their own, so that
    kernels leave `qzeros` unread. A second model's experts are all read, and its embeddings not at all."""
    rows: dict[str, list[tuple[int, int, int, int]]] = {}
    for info, count in tensors.items():
        kind, parts = kind_of(info), parts_of(info, geometry, settings)
        loaded = loaded_bytes(info, kind, settings)
        is_unread = symmetric and info.name.endswith((".qzeros", ".g_idx"))
        read = 0 if is_unread or (kind == DRAFTER and "embed_tokens" in info.name) else -(-loaded // parts)
        loaded = -(-(loaded + copied_bytes(info, kind, settings)) // parts)
        rows.setdefault(kind, []).append((count, count * info.nbytes, count * loaded, count * read))
    return [WeightKind(kind, *map(sum, zip(*rows[kind], strict=True))) for kind in RULES["weights"] if kind in rows]


def parts_of(info: TensorInfo, geometry: Geometry, settings: Settings) -> int:
    """How many different parts of a tensor the ranks have: one each, or fewer where some have the same.

    Embeddings and LM head are divided by rows (model_executor/layers/vocab_parallel_embedding.py), projections and
    experts by their heads or width with the scales that belong to them.
    """
    if has_piece(info, "copied") or (settings.platform == "cuda" and has_piece(info, "copied_on_cuda")):
        return 1
    return min(settings.ranks, geometry.kv_heads) if has_piece(info, "by_kv_heads") else settings.ranks


def has_piece(info: TensorInfo, table: str) -> bool:
    """Whether the name has one of a table of rules.yaml, after a dot."""
    return any(piece in f".{info.name}" for piece in RULES[table])


def kind_of(info: TensorInfo) -> str:
    """By the tensor's name and type, with the tables of rules.yaml."""
    name = f".{info.name}"
    if kind := next((kind for piece, kind in RULES["by_name"].items() if piece in name), None):
        return MTP_EXPERTS if kind == MTP and ".experts." in name else kind
    place = "experts" if ".experts." in name else "layers"
    facts = f"{place} {name.rpartition('.')[2]} {info.dtype}"
    return next(f"{form} {place}" for pattern, form in RULES["by_type"].items() if fnmatchcase(facts, pattern))


def loaded_bytes(info: TensorInfo, kind: str, settings: Settings) -> int:
    """An MTP drafter shares embeddings and LM head with the model (vLLM 0.32, v1/spec_decode/llm_base_proposer.py)."""
    if (kind in (MTP, MTP_EXPERTS) and not settings.draft_layers) or (kind == VISION and settings.text_only):
        return 0
    if settings.int8_head and is_head_weight(info, kind):
        # mods/int8-lm-head: codes in rows of whole 64 columns, a 16-bit scale for each row and column, which a
        # checkpoint that holds the codes has as tensors of their own.
        rows, columns = info.shape
        return rows * (-(-columns // 64) * 64) + (0 if info.dtype == "I8" else 2 * (rows + columns))
    # There the mods expand INT4 experts and FP8 layers to 16 bits.
    if settings.platform == "cpu" and kind == "INT4 experts":
        return info.nbytes * 4 if info.name.endswith(".qweight") else 0  # eight codes in each int32
    if settings.platform == "cpu" and kind == "FP8 layers":
        return info.nbytes * 2 if info.name.endswith(".weight") else 0
    return info.nbytes


def is_head_weight(info: TensorInfo, kind: str) -> bool:
    """Whether int8-lm-head makes codes of it. One in INT4 or FP8 stays as it is, and so do its scales."""
    is_named = (kind == HEAD and info.name.endswith(".weight")) or info.name.endswith("/lm_head.weight")
    return is_named and len(info.shape) == 2 and info.dtype in ("BF16", "F16", "F32", "I8")


def copied_bytes(info: TensorInfo, kind: str, settings: Settings) -> int:
    """Rows that a drafter has of its own; scales of columns, in one dimension, are shared.

    Those of 4 bits are packed as int8-lm-head's `int4` says on a GPU, with scales of 32 bits; on a CPU they are as the
    head's.
    """
    if kind != HEAD or not settings.draft_rows or len(info.shape) != 2:
        return 0
    rows = info.shape[0]
    if settings.draft_bits == 4:
        return min(settings.draft_rows, rows) * (-(-info.shape[1] // 32) * 16 + 4)
    return loaded_bytes(info, kind, settings) * min(settings.draft_rows, rows) // rows
