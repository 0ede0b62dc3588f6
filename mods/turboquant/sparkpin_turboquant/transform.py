"""The Triton kernels around attention: rotate queries, encode and store new keys and values, merge and rotate back.

A vector of D = A * 16 components is held as ``[A, 16]``; the Walsh-Hadamard transform is then one of 16 along the rows
and one of A along the columns, in float32 additions.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sparkpin_turboquant.attend import _runs
from sparkpin_turboquant.codebook import edges, magnitudes

E4, E3 = tl.constexpr(edges(4)), tl.constexpr(edges(3))
C4, C3 = tl.constexpr(magnitudes(4)), tl.constexpr(magnitudes(3))
FLOAT16_MAX = tl.constexpr(65504.0)


@triton.jit
def _signs(W: tl.constexpr):
    """``[W, W]`` Sylvester's Hadamard matrix: -1 where i & j has an odd number of bits."""
    i = tl.arange(0, W)[:, None] & tl.arange(0, W)[None, :]
    i ^= i >> 4
    i ^= i >> 2
    i ^= i >> 1
    return 1.0 - 2.0 * (i & 1).to(tl.float32)


@triton.jit
def _hadamard(x, A: tl.constexpr, NORM: tl.constexpr):
    """``x`` ``[A, 16]`` float32, component d at [d // 16, d % 16] -> its orthonormal transform (NORM is 1 /
    sqrt(D))."""
    rows = tl.sum(x[:, :, None] * _signs(16)[None, :, :], 1)
    return tl.sum(rows[:, None, :] * _signs(A)[:, :, None], 0) * NORM


@triton.jit
def _index(u, BITS: tl.constexpr):
    """Index of the magnitude of `u`, and that magnitude."""
    size = tl.abs(u)
    index = tl.zeros(u.shape, dtype=tl.int32)
    value = tl.full(u.shape, C4[0] if BITS == 4 else C3[0], dtype=tl.float32)
    for i in tl.static_range(2 ** (BITS - 1) - 1):
        above = size > (E4[i] if BITS == 4 else E3[i])
        index += above.to(tl.int32)
        value = tl.where(above, C4[i + 1] if BITS == 4 else C3[i + 1], value)
    return index, value


@triton.jit
def _encode(
    x, sign, codes, stride, norm_at, BITS: tl.constexpr, A: tl.constexpr, ROOT: tl.constexpr, NORM: tl.constexpr
):
    """Code one vector ``[A, 16]``: its bytes go `stride` apart from `codes` on, its norm to `norm_at`."""
    D: tl.constexpr = A * 16
    y = _hadamard(x.to(tl.float32) * sign, A, NORM)
    if BITS == 8:
        largest = tl.max(tl.max(tl.abs(y), 1), 0)
        norm = tl.minimum(largest / 127.0, FLOAT16_MAX).to(tl.float16)
        step = norm.to(tl.float32)
        ratio = tl.where(step > 0.0, y / tl.where(step > 0.0, step, 1.0), 0.0)
        code = tl.floor(tl.minimum(tl.maximum(ratio, -127.0), 127.0) + 0.5).to(tl.int32) & 255
        at = tl.arange(0, A)[:, None] * 16 + tl.arange(0, 16)[None, :]
        tl.store(codes + at * stride, code.to(tl.uint8))
    else:
        length = tl.sqrt(tl.sum(tl.sum(y * y, 1), 0))
        u = y * (ROOT / tl.where(length > 0.0, length, 1.0))
        index, value = _index(u, BITS)
        negative = (u < 0.0).to(tl.int32)
        norm = tl.minimum(length / tl.sqrt(tl.sum(tl.sum(value * value, 1), 0)), FLOAT16_MAX).to(tl.float16)
        if BITS == 4:
            half = tl.reshape(index | (negative << 3), (2, D // 2)) << (4 * tl.arange(0, 2))[:, None]
            tl.store(codes + tl.arange(0, D // 2) * stride, tl.sum(half, 0).to(tl.uint8))
        else:
            quarter = tl.reshape(index, (4, D // 4)) << (2 * tl.arange(0, 4))[:, None]
            tl.store(codes + tl.arange(0, D // 4) * stride, tl.sum(quarter, 0).to(tl.uint8))
            eighth = tl.reshape(negative, (8, D // 8)) << tl.arange(0, 8)[:, None]
            tl.store(codes + (D // 4 + tl.arange(0, D // 8)) * stride, tl.sum(eighth, 0).to(tl.uint8))
    tl.store(norm_at, norm)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def store(
    key,
    value,
    cache,
    slots,
    signs,
    key_stride,
    value_stride,
    block_bytes,
    A: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOT: tl.constexpr,
    ROOT: tl.constexpr,
    NORM: tl.constexpr,
):
    """Rotate, code and store the new tokens: grid ``(tokens, KV heads)``; key, value ``[tokens, heads, D]``, rows
    strided.

    slots ``[tokens]``: where each goes, ``block * BLOCK + place``; negative: padding, nothing is written.
    """
    token = tl.program_id(0)
    head = tl.program_id(1)
    D: tl.constexpr = A * 16
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    block = slot // BLOCK
    place = (slot % BLOCK).to(tl.int32)
    here = cache + block * block_bytes + head * (BLOCK * SLOT)
    d = tl.arange(0, A)[:, None] * 16 + tl.arange(0, 16)[None, :]
    sign = tl.load(signs + d)
    KEY_BYTES: tl.constexpr = D * KEY_BITS // 8
    VALUE_BYTES: tl.constexpr = D * VALUE_BITS // 8
    values = here + BLOCK * KEY_BYTES
    norms = (values + BLOCK * VALUE_BYTES).to(tl.pointer_type(tl.float16)) + 2 * place
    x = tl.load(key + token.to(tl.int64) * key_stride + head * D + d)
    _encode(x, sign, here + place * KEY_BYTES, 1, norms, KEY_BITS, A, ROOT, NORM)
    x = tl.load(value + token.to(tl.int64) * value_stride + head * D + d)
    at = values + (place // 16) * (16 * VALUE_BYTES) + place % 16
    _encode(x, sign, at, 16, norms + 1, VALUE_BITS, A, ROOT, NORM)


@triton.jit
def rotate(out, x, signs, stride, A: tl.constexpr, NORM: tl.constexpr, OVERLAP: tl.constexpr):
    """Grid ``(tokens, heads)``: ``x`` ``[tokens, heads, D]``, rows strided -> rotated, contiguous."""
    if OVERLAP:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, A)[:, None] * 16 + tl.arange(0, 16)[None, :]
    y = tl.load(x + token * stride + head * (A * 16) + d).to(tl.float32) * tl.load(signs + d)
    at = out + (token * tl.num_programs(1) + head) * (A * 16) + d
    tl.store(at, _hadamard(y, A, NORM).to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["SEQUENCES", "PROGRAMS", "SHARE"], do_not_specialize_on_alignment=["lengths", "starts"])
def merge(
    out,
    part,
    logs,
    signs,
    lengths,
    starts,
    SEQUENCES,
    PROGRAMS,
    SHARE,
    out_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    A: tl.constexpr,
    N: tl.constexpr,
    MOST: tl.constexpr,
    LOGS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Grid ``(SEQUENCES, ROWS, HEADS)``: the partial results of `attend` -> ``out`` ``[T, HEADS * GROUP * D]``,
    rotated back.

    A sequence of no tokens gives zeros.
    """
    b = tl.program_id(0)
    m = tl.program_id(1)
    head = tl.program_id(2)
    if OVERLAP:
        gdc_wait()
    query = tl.load(starts + b)
    if m // GROUP >= tl.load(starts + b + 1) - query:
        return
    D: tl.constexpr = A * 16
    all_ = tl.arange(0, MOST)
    tiles = tl.cdiv(tl.load(lengths + all_, mask=all_ < SEQUENCES, other=0), N)
    total = tl.sum(tiles, 0)
    runs = _runs(total, PROGRAMS, SHARE)
    before = tl.sum(tl.where(all_ < b, tiles, 0), 0)
    mine = tl.cdiv(tl.load(lengths + b), N)
    d = tl.arange(0, A)[:, None] * 16 + tl.arange(0, 16)[None, :]
    sum_ = tl.zeros((A, 16), dtype=tl.float32)
    weight = 0.0
    if mine > 0:
        # Program p works on tile t when p * total // runs <= t < (p + 1) * total // runs.
        first = (((before + 1).to(tl.int64) * runs - 1) // total).to(tl.int32)
        last = (((before + mine).to(tl.int64) * runs - 1) // total).to(tl.int32)
        every = first + tl.arange(0, LOGS)
        log = tl.load(logs + ((every + b) * HEADS + head) * ROWS + m, mask=every <= last, other=float("-inf"))
        top = tl.max(log, 0)
        weight = tl.sum(tl.exp2(log - top), 0)
        for start in range(first, last + 1, AT_ONCE):
            p = start + tl.arange(0, AT_ONCE)
            at = ((p + b).to(tl.int64) * HEADS + head) * ROWS + m
            w = tl.exp2(tl.load(logs + at, mask=p <= last, other=float("-inf")) - top)
            x = tl.load(part + at[:, None, None] * D + d[None, :, :], mask=(p <= last)[:, None, None], other=0.0)
            sum_ += tl.sum(x.to(tl.float32) * w[:, None, None], 0)
    y = _hadamard(sum_ / tl.where(weight > 0.0, weight, 1.0), A, NORM) * tl.load(signs + d)
    at = out + (query + m // GROUP).to(tl.int64) * out_stride + (head * GROUP + m % GROUP) * D + d
    tl.store(at, y.to(out.dtype.element_ty))


def constants(head_dim: int) -> dict[str, float]:
    """ROOT and NORM of a head size."""
    return {"ROOT": math.sqrt(head_dim), "NORM": 1 / math.sqrt(head_dim)}
