"""The peer: paged split-KV decode attention on bfloat16, GQA-packed, in Triton, with its own tiles tuned per case."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit(do_not_specialize=["SPLITS"])
def split(
    Q, K, V, TABLE, LENGTHS, PART, LOGS, SPLITS, scale, WIDTH,
    HK: tl.constexpr, G: tl.constexpr, QL: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (SPLITS, HK, sequences). Q ``[B * QL, HK * G, D]``, K, V ``[blocks, BLOCK, HK, D]``."""
    s = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2)
    m = tl.arange(0, M)
    d = tl.arange(0, D)
    L = tl.load(LENGTHS + b)
    row = (b * QL + m // G) * (HK * G) + h * G + m % G
    ok = m < G * QL
    q = tl.load(Q + row[:, None] * D + d[None, :], mask=ok[:, None], other=0.0)
    tiles = tl.cdiv(L, N)
    top = tl.full([M], -1e30, tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    for t in tl.range(s * tiles // SPLITS, (s + 1) * tiles // SPLITS, num_stages=STAGES):
        block = tl.load(TABLE + b * WIDTH + t * N // BLOCK).to(tl.int64)
        n = t * N + tl.arange(0, N)
        at = ((block * BLOCK + t * N % BLOCK + tl.arange(0, N)) * HK + h) * D
        k = tl.load(K + at[:, None] + d[None, :])
        S = tl.dot(q, k.T) * scale
        S = tl.where(n[None, :] <= (L - QL) + (m // G)[:, None], S, float("-inf"))
        new = tl.maximum(top, tl.max(S, 1))
        p = tl.exp2(S - new[:, None])
        f = tl.exp2(top - new)
        total = total * f + tl.sum(p, 1)
        top = new
        v = tl.load(V + at[:, None] + d[None, :])
        acc = tl.dot(p.to(tl.bfloat16), v, acc * f[:, None])
    tl.store(
        PART + (row[:, None] * SPLITS + s) * D + d[None, :], acc / tl.maximum(total, 1e-30)[:, None], mask=ok[:, None]
    )
    tl.store(LOGS + row * SPLITS + s, tl.where(total > 0, top + tl.log2(total), float("-inf")), mask=ok)


@triton.jit(do_not_specialize=["SPLITS"])
def merge(PART, LOGS, OUT, SPLITS, D: tl.constexpr, BD: tl.constexpr, AT_ONCE: tl.constexpr):
    row = tl.program_id(0)
    d = tl.program_id(1) * BD + tl.arange(0, BD)
    top = -1e30
    total = 0.0
    acc = tl.zeros([BD], tl.float32)
    for i in tl.range(0, SPLITS, AT_ONCE):
        j = i + tl.arange(0, AT_ONCE)
        log = tl.load(LOGS + row * SPLITS + j, mask=j < SPLITS, other=float("-inf"))
        new = tl.maximum(top, tl.max(log, 0))
        w = tl.exp2(log - new)
        f = tl.exp2(top - new)
        x = tl.load(PART + (row * SPLITS + j)[:, None] * D + d[None, :], mask=(j < SPLITS)[:, None], other=0.0)
        acc = acc * f + tl.sum(x * w[:, None], 0)
        total = total * f + tl.sum(w, 0)
        top = new
    tl.store(OUT + row * D + d, (acc / total).to(OUT.dtype.element_ty))


def attend(q, k, v, table, lengths, queries, scale, out, splits, n, warps, stages):
    rows, heads, d = q.shape
    hk = k.shape[2]
    group = heads // hk
    part = torch.empty(rows * heads, splits, d, dtype=torch.float32, device=q.device)
    logs = torch.empty(rows * heads, splits, dtype=torch.float32, device=q.device)
    split[(splits, hk, lengths.shape[0])](
        q, k, v, table, lengths, part, logs, splits, scale * 1.4426950408889634, table.stride(0),
        HK=hk, G=group, QL=queries, M=max(16, triton.next_power_of_2(group * queries)), D=d, BLOCK=k.shape[1], N=n,
        STAGES=stages, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    merge[(rows * heads, d // 64)](part, logs, out, splits, D=d, BD=64, AT_ONCE=32, num_warps=2)
