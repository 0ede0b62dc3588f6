"""The Triton kernel: INT8 weights times 16-bit activations, each weight read once for a whole tile of tokens.

Weights go through shared memory as INT8 and become 16-bit numbers in registers, so memory carries one byte for each.
The conversion is exact in both types: bfloat16 holds every integer up to 256, float16 up to 2048.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from sparkpin_int8_lm_head.tuned import Tuned

if TYPE_CHECKING:  # an image's build imports this under emulation, where torch takes minutes
    import torch

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Triton's interpreter has no inline assembly, and multiplies the bits of bfloat16 numbers: there float32 stands for
both 16-bit types, which is as exact."""


@triton.jit
def _to_float16(w):
    """int8 -> float16. ``0x6400 | u`` is the float16 number 1024 + u, for u = w + 128 in one byte."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 u, bias;
        mov.b32 bias, 0x64806480;
        xor.b32 u, $2, 0x80808080;
        prmt.b32 $0, u, 0x64646464, 0x4140;
        prmt.b32 $1, u, 0x64646464, 0x4342;
        sub.f16x2 $0, $0, bias;
        sub.f16x2 $1, $1, bias;
        }""",
        "=r,=r,r",
        [w],
        dtype=tl.float16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def _to_bfloat16(w):
    """int8 -> bfloat16. ``0x4300 | low`` is 128 + low, for the lower seven bits; the sign bit alone makes 128 or 256.

    Their difference is w; it is written as a fused multiply-add because sub.bf16x2 needs SM90.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, low, high, minus;
        mov.b32 minus, 0xBF80BF80;
        prmt.b32 a, $2, 0x43434343, 0x4140;
        prmt.b32 b, $2, 0x43434343, 0x4342;
        and.b32 low, a, 0xFF7FFF7F;
        and.b32 high, a, 0xFF80FF80;
        fma.rn.bf16x2 $0, high, minus, low;
        and.b32 low, b, 0xFF7FFF7F;
        and.b32 high, b, 0xFF80FF80;
        fma.rn.bf16x2 $1, high, minus, low;
        }""",
        "=&r,=&r,r",
        [w],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=4,
    )


@triton.jit(do_not_specialize=["B"])
def int8_head(
    out,
    x,
    q,
    row_scale,
    bias,
    B,
    V,
    K,
    stride_q,
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """``out[b, v] = row_scale[v] * sum_k q[v, k] * x[b, k] + bias[v]`` for one tile of V and one of B.

    out ``[B, V]`` and x ``[B, K]`` are contiguous; q ``[V, >= K]`` int8 has rows of stride_q bytes. Its last row must
    be followed by BLOCK_K bytes that may be read: beyond K the weights are not masked (any INT8 number times zero is
    zero, it has no NaN), x is.
    """
    tiles_b = tl.cdiv(B, BLOCK_B)
    pid = tl.program_id(0)
    # Tiles of B that share weights are neighbours in time: only the first reads them from memory, the others from L2.
    rows = (pid // tiles_b) * BLOCK_V + tl.arange(0, BLOCK_V)
    tokens = (pid % tiles_b) * BLOCK_B + tl.arange(0, BLOCK_B)
    ks = tl.arange(0, BLOCK_K)
    is_row = rows < V
    is_token = tokens < B
    weights = q + tl.where(is_row, rows, 0).to(tl.int64)[:, None] * stride_q + ks[None, :]
    inputs = x + tokens.to(tl.int64)[None, :] * K + ks[:, None]
    sums = tl.zeros((BLOCK_V, BLOCK_B), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        w = tl.load(weights + k, eviction_policy="evict_first")
        h = tl.load(inputs + k, mask=is_token[None, :] & (ks < K - k)[:, None], other=0.0)
        if not ASSEMBLY:
            sums = tl.dot(w.to(tl.float32), h.to(tl.float32), sums)
        elif h.dtype == tl.float16:
            sums = tl.dot(_to_float16(w), h, sums)
        else:
            sums = tl.dot(_to_bfloat16(w), h, sums)
    logits = sums * tl.load(row_scale + rows, mask=is_row, other=0.0).to(tl.float32)[:, None]
    if HAS_BIAS:
        logits += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)[:, None]
    places = out + tokens.to(tl.int64)[None, :] * V + rows[:, None]
    tl.store(places, logits.to(out.dtype.element_ty), mask=is_row[:, None] & is_token[None, :])


def launch(
    out: torch.Tensor,
    x: torch.Tensor,
    q: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None,
    tuned: Tuned,
) -> None:
    """Run `int8_head` on contiguous ``out`` ``[B, V]``, ``x`` ``[B, K]`` and ``q`` from `layout.lay_out`."""
    tokens, rows = out.shape
    grid = (triton.cdiv(rows, tuned.block_v) * triton.cdiv(tokens, tuned.block_b),)
    int8_head[grid](
        out,
        x,
        q,
        row_scale,
        bias,
        tokens,
        rows,
        x.shape[1],
        q.stride(0),
        BLOCK_B=tuned.block_b,
        BLOCK_V=tuned.block_v,
        BLOCK_K=tuned.block_k,
        HAS_BIAS=bias is not None,
        ASSEMBLY=not INTERPRETED,
        num_warps=tuned.warps,
        num_stages=tuned.stages,
    )
