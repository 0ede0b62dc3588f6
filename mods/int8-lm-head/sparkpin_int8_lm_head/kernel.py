"""The Triton kernels: INT8 weights times 16-bit fixed-point activations, in whole numbers.

An activation is written as two INT8 digits (naive.digits), so the matrix units multiply INT8 by INT8 and add up in
int32, exactly. Nothing is converted on the way: weights go from memory to shared memory to the matrix units, each
read once for a whole tile of tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from sparkpin_int8_lm_head.tuned import Tuned

if TYPE_CHECKING:  # an image's build imports this under emulation, where torch takes minutes
    import torch

INPUT_BLOCK = 4096
INPUT_WARPS = 8


@triton.jit
def input_digits(digits, scale, x, column_scale, K, S, HAS_COLUMN_SCALE: tl.constexpr, BLOCK: tl.constexpr):
    """naive.digits for one token: x ``[B, K]`` contiguous -> digits ``[B, 2, S]`` int8, zero beyond K; scale ``[B]``.

    A token that holds NaN or infinity gets scale NaN, and so do its logits.
    """
    token = tl.program_id(0).to(tl.int64)
    x += token * K
    digits += token * 2 * S
    ks = tl.arange(0, BLOCK)
    top = tl.zeros((BLOCK,), dtype=tl.float32)
    bad = tl.zeros((BLOCK,), dtype=tl.int32)
    for k in range(0, K, BLOCK):
        h = tl.load(x + k + ks, mask=ks < K - k, other=0.0).to(tl.float32)
        if HAS_COLUMN_SCALE:
            h *= tl.load(column_scale + k + ks, mask=ks < K - k, other=0.0).to(tl.float32)
        top = tl.maximum(top, tl.abs(h))
        bad = tl.maximum(bad, (tl.abs(h) < float("inf")).to(tl.int32) ^ 1)
    largest = tl.max(top, axis=0)
    step = tl.where(largest > 1e-30, largest / 32512.0, 1.0)
    for k in range(0, S, BLOCK):
        h = tl.load(x + k + ks, mask=ks < K - k, other=0.0).to(tl.float32)
        if HAS_COLUMN_SCALE:
            h *= tl.load(column_scale + k + ks, mask=ks < K - k, other=0.0).to(tl.float32)
        number = tl.floor(h / step + 0.5).to(tl.int32)
        high = (number + 128) >> 8
        tl.store(digits + k + ks, high.to(tl.int8), mask=ks < S - k)
        tl.store(digits + S + k + ks, (number - high * 256).to(tl.int8), mask=ks < S - k)
    tl.store(scale + token, tl.where(tl.max(bad, axis=0) > 0, float("nan"), step))


@triton.jit(do_not_specialize=["B"])
def int8_head(
    out,
    digits,
    scale,
    q,
    row_scale,
    bias,
    B,
    V,
    S,
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """``out[b, v] = row_scale[v] * scale[b] * sum_k q[v, k] * (256 * digits[b, 0, k] + digits[b, 1, k]) + bias[v]``.

    One tile of V and one of B. out ``[B, V]`` and digits ``[B, 2, S]`` are contiguous; rows of q are S bytes apart, and
    BLOCK_K bytes behind the last may be read: beyond S the weights are not masked (any INT8 number times zero is zero,
    it has no NaN), the digits are.
    """
    tiles_b = tl.cdiv(B, BLOCK_B)
    tile = tl.program_id(0)
    # Tiles of B that share weights are neighbours in time: only the first reads them from memory, the others from L2.
    rows = (tile // tiles_b) * BLOCK_V + tl.arange(0, BLOCK_V)
    tokens = (tile % tiles_b) * BLOCK_B + tl.arange(0, BLOCK_B)
    lines = (tile % tiles_b) * (2 * BLOCK_B) + tl.arange(0, 2 * BLOCK_B)
    ks = tl.arange(0, BLOCK_K)
    is_row = rows < V
    weights = q + tl.where(is_row, rows, 0).to(tl.int64)[:, None] * S + ks[None, :]
    inputs = digits + lines.to(tl.int64)[None, :] * S + ks[:, None]
    sums = tl.zeros((BLOCK_V, 2 * BLOCK_B), dtype=tl.int32)
    for k in range(0, S, BLOCK_K):
        w = tl.load(weights + k, eviction_policy="evict_first")
        d = tl.load(inputs + k, mask=(lines < 2 * B)[None, :] & (ks < S - k)[:, None], other=0)
        sums = tl.dot(w, d, sums, out_dtype=tl.int32)
    _store(out, sums, scale, row_scale, bias, rows, tokens, B, V, BLOCK_B, BLOCK_V, HAS_BIAS)


@triton.jit(do_not_specialize=["B"])
def int4_head(
    out,
    digits,
    scale,
    q,
    row_scale,
    B,
    V,
    H,
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IN_WORDS: tl.constexpr,
):
    """What `int8_head` computes, without a bias, of what `int4.unpack` makes of q.

    Byte k of a row has columns k and H + k, so that either half of a tile's bytes meets digits that lie together.
    digits are ``[B, 2, 2 * H]``; rows of q are H bytes apart, and BLOCK_K bytes behind the last may be read. IN_WORDS:
    four bytes are unpacked at a time, which Triton's interpreter cannot.
    """
    tiles_b = tl.cdiv(B, BLOCK_B)
    tile = tl.program_id(0)
    rows = (tile // tiles_b) * BLOCK_V + tl.arange(0, BLOCK_V)
    tokens = (tile % tiles_b) * BLOCK_B + tl.arange(0, BLOCK_B)
    lines = (tile % tiles_b) * (2 * BLOCK_B) + tl.arange(0, 2 * BLOCK_B)
    ks = tl.arange(0, BLOCK_K)
    weights = q + tl.where(rows < V, rows, 0).to(tl.int64)[:, None] * H + ks[None, :]
    inputs = digits + lines.to(tl.int64)[None, :] * (2 * H) + ks[:, None]
    is_line = (lines < 2 * B)[None, :]
    sums = tl.zeros((BLOCK_V, 2 * BLOCK_B), dtype=tl.int32)
    for k in range(0, H, BLOCK_K):
        w = tl.load(weights + k, eviction_policy="evict_first")
        is_input = is_line & (ks < H - k)[:, None]
        low, high = _numbers(w, IN_WORDS)
        sums = tl.dot(low, tl.load(inputs + k, mask=is_input, other=0), sums, out_dtype=tl.int32)
        sums = tl.dot(high, tl.load(inputs + H + k, mask=is_input, other=0), sums, out_dtype=tl.int32)
    _store(out, sums, scale, row_scale, None, rows, tokens, B, V, BLOCK_B, BLOCK_V, False)


@triton.jit
def _numbers(w, IN_WORDS: tl.constexpr):
    """The numbers 16 c + 8 of the codes in the lower and in the upper half of each byte."""
    if IN_WORDS:
        low = tl.inline_asm_elementwise(
            "{.reg .b32 x; shl.b32 x, $1, 4; lop3.b32 $0, x, 0xf0f0f0f0, 0x08080808, 0xea;}",
            "=r,r",
            [w],
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        )
        high = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, 0xf0f0f0f0, 0x08080808, 0xea;", "=r,r", [w], dtype=tl.int8, is_pure=True, pack=4
        )
    else:
        low, high = (w << 4) | 8, (w & -16) | 8
    return low.to(tl.int8), high.to(tl.int8)


@triton.jit
def _store(
    out,
    sums,
    scale,
    row_scale,
    bias,
    rows,
    tokens,
    B,
    V,
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """One tile's logits from its sums ``[BLOCK_V, 2 * BLOCK_B]``, a high and a low one for each token."""
    is_row = rows < V
    high, low = tl.split(tl.reshape(sums, (BLOCK_V, BLOCK_B, 2)))
    is_token = tokens < B
    by_row = tl.load(row_scale + rows, mask=is_row, other=0.0).to(tl.float32)
    by_token = tl.load(scale + tokens, mask=is_token, other=0.0)
    logits = (high.to(tl.float32) * 256.0 + low.to(tl.float32)) * by_token[None, :] * by_row[:, None]
    if HAS_BIAS:
        logits += tl.load(bias + rows, mask=is_row, other=0.0).to(tl.float32)[:, None]
    places = out + tokens.to(tl.int64)[None, :] * V + rows[:, None]
    tl.store(places, logits.to(out.dtype.element_ty), mask=is_row[:, None] & is_token[None, :])


def launch_digits(
    digits: torch.Tensor, scale: torch.Tensor, x: torch.Tensor, column_scale: torch.Tensor | None
) -> None:
    """Run `input_digits` on contiguous ``x`` ``[B, K]``: digits ``[B, 2, S]`` int8 and scale ``[B]`` float32 come."""
    input_digits[(x.shape[0],)](
        digits,
        scale,
        x,
        column_scale,
        x.shape[1],
        digits.shape[2],
        HAS_COLUMN_SCALE=column_scale is not None,
        BLOCK=INPUT_BLOCK,
        num_warps=INPUT_WARPS,
    )


def launch_head(
    out: torch.Tensor,
    digits: torch.Tensor,
    scale: torch.Tensor,
    q: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None,
    tuned: Tuned,
) -> None:
    """Run `int8_head` on what `launch_digits` wrote and on ``q`` from `layout.lay_out`, into ``out`` ``[B, V]``."""
    tokens, rows = out.shape
    grid = (triton.cdiv(rows, tuned.block_v) * triton.cdiv(tokens, tuned.block_b),)
    width = digits.shape[2]
    has_bias = bias is not None
    int8_head[grid](out, digits, scale, q, row_scale, bias, tokens, rows, width, HAS_BIAS=has_bias, **tuned.options)


def launch_int4(
    out: torch.Tensor,
    digits: torch.Tensor,
    scale: torch.Tensor,
    packed: torch.Tensor,
    row_scale: torch.Tensor,
    tuned: Tuned,
) -> None:
    """Run `int4_head` on what `launch_digits` wrote and on `packed` rows in `int4.memory`, into ``out`` ``[B, V]``."""
    tokens, rows = out.shape
    grid = (triton.cdiv(rows, tuned.block_v) * triton.cdiv(tokens, tuned.block_b),)
    width, in_words = packed.stride(0), not triton.knobs.runtime.interpret
    int4_head[grid](out, digits, scale, packed, row_scale, tokens, rows, width, IN_WORDS=in_words, **tuned.options)
