"""The Triton kernel that rotates, encodes and stores new keys and values.

A vector of D = A * 16 components is held as ``[A, 16]``; the Walsh-Hadamard transform is then one of 16 along the rows
and one of A along the columns, in float32 additions.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

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
def _store_keys(codes, index, negative, D: tl.constexpr, BITS: tl.constexpr):
    """Magnitudes and signs ``[D / 16, 16]`` -> words, as `naive.pack_keys` says."""
    i = tl.arange(0, 8)[None, :]
    at = tl.where(i < 4, 8 * i + 4, 8 * i - 32)  # of a sign in its word
    words = codes.to(tl.pointer_type(tl.int32))
    if BITS == 4:
        eights = tl.reshape(index, (D // 8, 8)) << (4 * i)
        eights |= tl.reshape(negative, (D // 8, 8)) << (at + 3)
        tl.store(words + tl.arange(0, D // 8), tl.sum(eights, 1))
    else:
        j = tl.arange(0, 16)[None, :]
        tl.store(words + tl.arange(0, D // 16), tl.sum(index << (4 * (j % 8) + 2 * (j // 8)), 1))
        plane = tl.arange(0, 4)[None, :, None]
        signs = tl.reshape(negative, (D // 32, 4, 8)) << (at[:, None, :] + plane)
        tl.store(words + D // 16 + tl.arange(0, D // 32), tl.sum(tl.sum(signs, 2), 1))


@triton.jit
def _store_values(codes, token, index, negative, D: tl.constexpr, BITS: tl.constexpr):
    """Magnitudes and signs ``[D / 16, 16]`` of one of a group's 16 tokens -> bytes, as `naive.value_places` says."""
    g = tl.arange(0, 8)[None, :]
    if BITS == 4:
        r = tl.arange(0, D // 16)[:, None]
        pairs = tl.reshape(index | (negative << 3), (D // 16, 2, 8)) << (4 * tl.arange(0, 2))[None, :, None]
        at = r // 2 * 256 + g * 32 + token // 4 * 8 + r % 2 * 4 + token % 4
        tl.store(codes + at, tl.sum(pairs, 1).to(tl.uint8))
    else:
        r, u = tl.arange(0, D // 32)[:, None], tl.arange(0, D // 64)[:, None]
        i, j = tl.arange(0, 4)[None, :, None], tl.arange(0, 8)[None, :, None]
        fours = tl.reshape(index, (D // 32, 4, 8)) << (i // 2 * 2 + i % 2 * 4)
        tl.store(codes + r // 2 * 384 + r % 2 * 128 + g * 16 + token, tl.sum(fours, 1).to(tl.uint8))
        eights = tl.reshape(negative, (D // 64, 8, 8)) << (j // 2 + j % 2 * 4)
        tl.store(codes + u * 384 + 256 + g * 16 + token, tl.sum(eights, 1).to(tl.uint8))


@triton.jit
def _code(x, sign, norm_at, BITS: tl.constexpr, A: tl.constexpr, ROOT: tl.constexpr, NORM: tl.constexpr):
    """Code one vector ``[A, 16]`` -> magnitudes and whether negative (8 bits: the code twice); stores its norm."""
    y = _hadamard(x.to(tl.float32) * sign, A, NORM)
    if BITS == 8:
        largest = tl.max(tl.max(tl.abs(y), 1), 0)
        norm = tl.minimum(largest / 127.0, FLOAT16_MAX).to(tl.float16)
        step = norm.to(tl.float32)
        ratio = tl.where(step > 0.0, y / tl.where(step > 0.0, step, 1.0), 0.0)
        index = tl.floor(tl.minimum(tl.maximum(ratio, -127.0), 127.0) + 0.5).to(tl.int32) & 255
        negative = index
    else:
        length = tl.sqrt(tl.sum(tl.sum(y * y, 1), 0))
        u = y * (ROOT / tl.where(length > 0.0, length, 1.0))
        index, value = _index(u, BITS)
        negative = (u < 0.0).to(tl.int32)
        norm = tl.minimum(length / tl.sqrt(tl.sum(tl.sum(value * value, 1), 0)), FLOAT16_MAX).to(tl.float16)
    tl.store(norm_at, norm)
    return index, negative


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
    block_size,
    head_bytes,
    A: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    ROOT: tl.constexpr,
    NORM: tl.constexpr,
):
    """Rotate, code and store the new tokens: grid ``(tokens, KV heads)``; key, value ``[tokens, heads, D]``, rows
    strided.

    slots ``[tokens]``: where each goes, ``block * block_size + place``; negative: padding, nothing is written.
    """
    token = tl.program_id(0)
    head = tl.program_id(1)
    D: tl.constexpr = A * 16
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    block = slot // block_size
    place = (slot % block_size).to(tl.int32)
    here = cache + block * block_bytes + head * head_bytes
    d = tl.arange(0, A)[:, None] * 16 + tl.arange(0, 16)[None, :]
    sign = tl.load(signs + d)
    KEY_BYTES: tl.constexpr = D * KEY_BITS // 8
    VALUE_BYTES: tl.constexpr = D * VALUE_BITS // 8
    values = here + block_size * KEY_BYTES
    norms = (values + block_size * VALUE_BYTES).to(tl.pointer_type(tl.float16)) + 2 * place
    codes = here + place * KEY_BYTES
    x = tl.load(key + token.to(tl.int64) * key_stride + head * D + d)
    index, negative = _code(x, sign, norms, KEY_BITS, A, ROOT, NORM)
    if KEY_BITS == 8:
        tl.store(codes + d, index.to(tl.uint8))
    else:
        _store_keys(codes, index, negative, D, KEY_BITS)
    x = tl.load(value + token.to(tl.int64) * value_stride + head * D + d)
    index, negative = _code(x, sign, norms + 1, VALUE_BITS, A, ROOT, NORM)
    _store_values(values + (place // 16) * (16 * VALUE_BYTES), place % 16, index, negative, D, VALUE_BITS)


def constants(head_dim: int) -> dict[str, float]:
    """ROOT and NORM of a head size."""
    return {"ROOT": math.sqrt(head_dim), "NORM": 1 / math.sqrt(head_dim)}
