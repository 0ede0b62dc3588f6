"""What no header and no rule gives: rough figures with their range. rules.yaml says where each comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sparkpin.memory.geometry import DTYPE_BYTES, RULES, Geometry
from sparkpin.memory.settings import GIB, Settings

SPARK_TOTAL, SPARK_FREE = (int(RULES["spark"][name] * GIB) for name in ("total", "free"))
SPARK_BANDWIDTH = RULES["spark"]["bandwidth"] * 1e9  # bytes a second

How = Literal["header", "config", "flag", "vLLM's rule", "estimate", "measured"]


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """One share of the memory, and how it is known. span: lowest and highest bytes."""

    what: str
    bytes: int
    span: tuple[int, int]
    how: How
    note: str


def estimated(what: str, scale: float = 1.0) -> MemoryLine:
    """A row of `estimates` in rules.yaml. scale: of its likely size."""
    likely, low, high = (int(size * GIB) for size in RULES["estimates"][what]["gib"])
    return MemoryLine(what, int(likely * scale), (low, high), "estimate", RULES["estimates"][what]["note"])


def activations(geometry: Geometry, settings: Settings) -> MemoryLine:
    """Peak of the profiling step, which runs max_num_batched_tokens at once: its largest layer, its sampler, or the
    vision encoder before it.

    Counted are the tensors that live together: residual stream and layer norms, and of the layer its projections, chunk
    states or the experts' work buffers; of the sampler the logits at 16 bits and two float32 copies. The kernels' own
    workspaces are not, so the true peak may be higher.
    """
    own, size, tokens = geometry.shard(settings.ranks), DTYPE_BYTES[settings.dtype], settings.max_num_batched_tokens
    values = own.value_heads * own.value_dim
    mixed = 2 * own.key_heads * own.key_dim + values
    per_token = (
        size * max(1, own.experts_per_token) * (max(2 * own.expert_width, own.hidden) + own.expert_width),
        size * (2 * mixed + 3 * values) + size * values * own.key_dim // RULES["chunk"],
        size * own.head_dim * (4 * own.heads + 2 * own.kv_heads),
    )
    # Checking drafted tokens is profiled with a second row of logits a sequence (v1/worker/gpu_model_runner.py).
    rows = min(tokens, settings.max_num_seqs) * (2 if settings.draft_tokens else 1)
    text = max(tokens * (max(per_token) + 4 * size * own.hidden), rows * own.vocabulary * (size + 8))
    image = 0 if settings.text_only else max(tokens, RULES["image"]["tokens"]) * RULES["image"]["token_bytes"]
    peak, step = max(text, image), f"{tokens:,} tokens a step, {settings.max_num_seqs:,} sequences"
    return MemoryLine("activations", peak, (text, peak * 3 // 2), "estimate", step)
