"""Cached tokens as plain keys and values again, a bounded number at a time: what prefill over a long history reads.

`expand` writes codes times norms, still rotated; a product with a matrix of +-1 turns them back. `fold` adds what
queries found in one part of their history to what they found before.
"""

# Triton decides an if on constants while it compiles; a conditional expression would need both values.
# ruff: noqa: SIM108

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from sparkpin_turboquant import rotation
from sparkpin_turboquant.codebook import magnitudes
from sparkpin_turboquant.cuda import Cache

C4, C3 = tl.constexpr(magnitudes(4)), tl.constexpr(magnitudes(3))
TOKENS = 32
"""Of one program of `expand`."""


@triton.jit
def _levels(code, BITS: tl.constexpr):
    """Codes of Lloyd-Max, their highest bit the sign -> centroids, float32."""
    HALF: tl.constexpr = 2 ** (BITS - 1)
    index = code & (HALF - 1)
    value = tl.zeros(code.shape, dtype=tl.float32)
    for i in tl.static_range(HALF):
        if BITS == 4:
            value = tl.where(index == i, C4[i], value)
        else:
            value = tl.where(index == i, C3[i], value)
    return tl.where(code >= HALF, -value, value)


@triton.jit
def _bits(at, is_token, shift, MASK: tl.constexpr):
    return (tl.load(at, mask=is_token[:, None], other=0).to(tl.int32) >> shift) & MASK


@triton.jit
def _key_codes(at, d, is_token, D: tl.constexpr, BITS: tl.constexpr):
    """``[T, D]`` codes as int32 of the keys whose bytes begin at `at` ``[T, 1]``: `formats.Layout`, byte by byte."""
    d = d[None, :]
    n = d % 8
    if BITS == 8:
        return tl.load(at + d, mask=is_token[:, None], other=0).to(tl.int8, bitcast=True).to(tl.int32)
    elif BITS == 4:
        word = at + d // 8 * 4
        negative = _bits(word + n % 4, is_token, tl.where(n < 4, 7, 3), 1)
        return _bits(word + n // 2, is_token, n % 2 * 4, 7) | (negative << 3)
    else:
        size = _bits(at + d // 16 * 4 + n // 2, is_token, n % 2 * 4 + d // 8 % 2 * 2, 3)
        plane = d // 8 % 4
        negative = _bits(at + D // 4 + d // 32 * 4 + n % 4, is_token, tl.where(n < 4, 4, 0) + plane, 1)
        return size | (negative << 2)


@triton.jit
def _value_codes(at, token, d, is_token, BITS: tl.constexpr):
    """The same of values. at ``[T, 1]``: where the bytes of a token's group begin; token ``[T]``: which of its 16."""
    d, t = d[None, :], token[:, None]
    r, half, g = d // 16, d // 8 % 2, d % 8
    if BITS == 4:
        return _bits(at + (r // 2 * 256 + g * 32 + r % 2 * 4) + (t // 4 * 8 + t % 4), is_token, half * 4, 15)
    else:
        s = r // 2
        size = _bits(at + (s // 2 * 384 + s % 2 * 128 + g * 16) + t, is_token, r % 2 * 2 + half * 4, 3)
        negative = _bits(at + (r // 4 * 384 + 256 + g * 16) + t, is_token, r % 4 + half * 4, 1)
        return size | (negative << 2)


@triton.jit(do_not_specialize=["first", "count", "place"], do_not_specialize_on_alignment=["row"])
def expand(
    out,
    cache,
    row,
    first,
    count,
    place,
    block_bytes,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOT: tl.constexpr,
    NORM: tl.constexpr,
    T: tl.constexpr,
):
    """Grid ``(count / T, HEADS)``: tokens `first` to ``first + count`` of a sequence whose blocks are `row` -> `out`.

    out: ``[tokens, 2, HEADS, D]``, key and value, from token `place` on: rotated, and times NORM.
    """
    i = tl.program_id(0) * T + tl.arange(0, T)
    head = tl.program_id(1)
    is_token = i < count
    n = first + i
    block = tl.load(row + n // BLOCK, mask=is_token, other=0).to(tl.int64)
    within = n % BLOCK
    here = cache + block * block_bytes + head * (BLOCK * SLOT)
    KEY_BYTES: tl.constexpr = D * KEY_BITS // 8
    VALUE_BYTES: tl.constexpr = D * VALUE_BITS // 8
    values = here + BLOCK * KEY_BYTES
    norms = (values + BLOCK * VALUE_BYTES).to(tl.pointer_type(tl.float16)) + within * 2
    d = tl.arange(0, D)
    at = out + ((place + i).to(tl.int64) * (2 * HEADS) + head)[:, None] * D + d[None, :]
    code = _key_codes((here + within * KEY_BYTES)[:, None], d, is_token, D, KEY_BITS)
    if KEY_BITS == 8:
        level = code.to(tl.float32)
    else:
        level = _levels(code, KEY_BITS)
    norm = tl.load(norms, mask=is_token, other=0.0).to(tl.float32) * NORM
    tl.store(at, (level * norm[:, None]).to(out.dtype.element_ty), mask=is_token[:, None])
    group = (values + (within // 16) * (16 * VALUE_BYTES))[:, None]
    level = _levels(_value_codes(group, within % 16, d, is_token, VALUE_BITS), VALUE_BITS)
    norm = tl.load(norms + 1, mask=is_token, other=0.0).to(tl.float32) * NORM
    tl.store(at + HEADS * D, (level * norm[:, None]).to(out.dtype.element_ty), mask=is_token[:, None])


@triton.jit(do_not_specialize=["logs_stride", "part_logs_stride"])
def fold(out, logs, part, part_logs, out_stride, logs_stride, part_stride, part_logs_stride, D: tl.constexpr):
    """Grid ``(tokens, heads)``: ``out``, ``part`` ``[tokens, heads, D]``; ``logs``, ``part_logs`` ``[heads, tokens]``.

    The logs are natural logarithms of the sums of exponents; infinite in `part_logs` where a query saw nothing.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, D)
    log = tl.load(logs + head * logs_stride + token)
    new = tl.load(part_logs + head * part_logs_stride + token)
    if tl.abs(new) == float("inf"):
        return
    top = tl.maximum(log, new)
    old_weight, new_weight = tl.exp(log - top), tl.exp(new - top)
    at = out + token * out_stride + head * D + d
    x = tl.load(at).to(tl.float32) * old_weight
    x += tl.load(part + token * part_stride + head * D + d).to(tl.float32) * new_weight
    total = old_weight + new_weight
    tl.store(at, (x / total).to(out.dtype.element_ty))
    tl.store(logs + head * logs_stride + token, top + tl.log(total))


@cache
def back(head_dim: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """``[D, D]`` of +-1, exact in any dtype: a rotated row vector times it and times 1 / sqrt(D) is the vector."""
    matrix = rotation.unrotate(torch.eye(head_dim)) * head_dim**0.5
    return matrix.round().to(device, dtype)


def expand_tokens(out: torch.Tensor, cache_: Cache, row: torch.Tensor, first: int, count: int, place: int) -> None:
    """Tokens of one sequence -> ``out`` ``[>= place + count, 2, heads, D]``, rotated. row: its blocks, int32."""
    expand[(triton.cdiv(count, TOKENS), cache_.heads)](
        out,
        cache_.data,
        row,
        first,
        count,
        place,
        cache_.block_bytes,
        HEADS=cache_.heads,
        D=cache_.head_dim,
        KEY_BITS=cache_.format.key_bits,
        VALUE_BITS=cache_.format.value_bits,
        BLOCK=cache_.block_size,
        SLOT=cache_.slot,
        NORM=cache_.head_dim**-0.5,
        T=TOKENS,
        num_warps=4,
    )


def fold_into(out: torch.Tensor, logs: torch.Tensor, part: torch.Tensor, part_logs: torch.Tensor) -> None:
    """``out``, ``part`` ``[T, H, D]``, ``logs``, ``part_logs`` ``[H, T]`` float32: both are changed in place."""
    tokens, heads, head_dim = out.shape
    fold[(tokens, heads)](
        out,
        logs,
        part,
        part_logs,
        out.stride(0),
        logs.stride(0),
        part.stride(0),
        part_logs.stride(0),
        D=head_dim,
        num_warps=1,
    )
