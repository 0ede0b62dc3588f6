"""From a profiler's trace to kernels, and from kernels to the parts of the model that a step's time goes to.

The standard library only.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

Row = tuple[str, float, float, str]
"""A kernel: name, begin and duration in microseconds, the innermost scope that launched it."""


def rows_of(events: list[dict[str, Any]]) -> list[Row]:
    """Kernels, copies and fills on the GPU in the order of their begin; without what no named scope launched."""
    scopes = sorted(
        (e["ts"], e["ts"] + e["dur"], e["name"].removeprefix("scope:"))
        for e in events
        if e.get("cat") == "user_annotation" and e["name"].startswith("scope:")
    )
    launched = {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    begins = [begin for begin, _, _ in scopes]
    rows = []
    for e in events:
        if e.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        at = launched.get(e.get("args", {}).get("correlation"))
        rows.append((e["name"], e["ts"], e["dur"], innermost(scopes, begins, at)))
    return sorted(rows, key=lambda row: row[1])


def innermost(scopes: list[tuple[float, float, str]], begins: list[float], at: float | None) -> str:
    """The scope that began last and has not ended; scopes nest."""
    if at is not None:
        for i in range(bisect_right(begins, at) - 1, max(-1, bisect_right(begins, at) - 9), -1):
            if at <= scopes[i][1]:
                return scopes[i][2]
    return ""


PARTS = ("attention", "GDN", "experts", "shared experts", "head", "draft", "draft head", "sampling", "other")
EXPERTS = ("marlin_moe", "topkGating", "draw", "moe_align", "count_and_sort", "moe_sum", "act_and_mul")
CORES = ("flash::FlashAttn", "reshape_and_cache", "kernel_unified_attention", "_attn_packed")
PLANS = "flash::prepare"
"""FlashAttention's plan for all layers, made once a step before the first of them, which is no attention layer."""

OWN_CORES = ("attend", "merge", "store")
"""Whole names, of turboquant's kernels. Others contain such words: the linear attention has merge_16x16_to_64x64."""
HEAD_US = 100
"""A matrix product outside of the layers that takes longer reads the LM head."""


def parts_of(rows: list[Row], layers: int) -> dict[str, float]:
    """Microseconds a step by part of the model, and `steps`. Sums of kernels: some run beside each other.

    A layer is a mixer (two INT4 projections, its core between them), then router, shared experts and experts.
    """
    found = dict.fromkeys(PARTS, 0.0)
    mixer: list[Row] = []
    projections = sums = 0
    for row in rows:
        name, _, duration, scope = row
        head = "int8_head" in name or "int4_head" in name or ("nvjet" in name and duration > HEAD_US)
        if scope == "propose":
            found["draft head" if head else "draft"] += duration
        elif scope in ("sample", "sample_tokens"):
            found["head" if head else "sampling"] += duration
        elif scope != "execute_model":
            found["other"] += duration
        elif projections == 2:
            found["experts" if any(part in name for part in EXPERTS) else "shared experts"] += duration
            if "moe_sum" in name:
                projections, sums = 0, sums + 1
        elif PLANS in name:
            found["attention"] += duration
        else:
            mixer.append(row)
            projections += "machete::" in name  # names of fused kernels have "machete_mm"
            if projections == 2:
                found["attention" if any(map(is_core, mixer)) else "GDN"] += sum(other[2] for other in mixer)
                mixer = []
    found["other"] += sum(row[2] for row in mixer)
    if not sums or sums % layers:
        raise ValueError(f"{sums} kernels moe_sum, expected one in each of {layers} layers and in each step")
    steps = sums / layers
    return {part: time / steps for part, time in found.items()} | {"steps": steps}


def is_core(row: Row) -> bool:
    """Whether a kernel is attention's own, between the projections."""
    return row[0].partition("(")[0] in OWN_CORES or any(part in row[0] for part in CORES)
