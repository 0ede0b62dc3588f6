"""A kernel of the kind that was published for this head, from its description, to compare with.

Scalar multiply-adds over rows of INT8 weights, several tokens in one launch up to four, and one launch for each token
beyond that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TOGETHER = 4


@triton.jit
def _rows(out, x, q, row_scale, V, K, T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr):
    rows = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_row = rows < V
    ks = tl.arange(0, BLOCK_K)
    a = tl.zeros((BLOCK_V, BLOCK_K), dtype=tl.float32)
    b, c, d = a, a, a
    for k in range(0, K, BLOCK_K):
        w = tl.load(q + rows.to(tl.int64)[:, None] * K + k + ks[None, :], mask=is_row[:, None], other=0).to(tl.float32)
        a += w * tl.load(x + k + ks).to(tl.float32)[None, :]
        if T > 1:
            b += w * tl.load(x + K + k + ks).to(tl.float32)[None, :]
        if T > 2:
            c += w * tl.load(x + 2 * K + k + ks).to(tl.float32)[None, :]
            d += w * tl.load(x + 3 * K + k + ks).to(tl.float32)[None, :]
    by_row = tl.load(row_scale + rows, mask=is_row, other=0.0).to(tl.float32)
    places = out + rows
    tl.store(places, (tl.sum(a, axis=1) * by_row).to(out.dtype.element_ty), mask=is_row)
    if T > 1:
        tl.store(places + V, (tl.sum(b, axis=1) * by_row).to(out.dtype.element_ty), mask=is_row)
    if T > 2:
        tl.store(places + 2 * V, (tl.sum(c, axis=1) * by_row).to(out.dtype.element_ty), mask=is_row)
        tl.store(places + 3 * V, (tl.sum(d, axis=1) * by_row).to(out.dtype.element_ty), mask=is_row)


SHAPES = [(4, 1024, 4), (8, 512, 4), (8, 1024, 4), (16, 256, 4), (16, 512, 4), (16, 1024, 8), (32, 256, 8)]
"""Rows and columns of a tile, warps: the best of these is taken."""


def row_loop(out: torch.Tensor, x: torch.Tensor, q: torch.Tensor, row_scale: torch.Tensor, shape: tuple[int, int, int]):
    """``x`` ``[B, K]`` and contiguous ``q`` ``[V, K]``, K a multiple of 1024 -> ``out`` ``[B, V]``."""
    block_v, block_k, warps = shape
    grid = (triton.cdiv(q.shape[0], block_v),)
    together = x.shape[0] if x.shape[0] in (1, 2, TOGETHER) else 1
    for start in range(0, x.shape[0], together):
        part = slice(start, start + together)
        _rows[grid](
            out[part], x[part], q, row_scale, *q.shape, T=together, BLOCK_V=block_v, BLOCK_K=block_k, num_warps=warps
        )
