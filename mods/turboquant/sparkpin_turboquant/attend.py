"""The attention kernel, in Triton: decode, MTP verification and prefill, over the compressed cache.

It computes the transposed products: scores ``[N, M]`` = keys ``[N, D]`` x queries ``[D, M]``, and outputs ``[D, M]`` =
values ``[D, N]`` x probabilities ``[N, M]``. So keys and values are the operand that matrix units take from registers,
where codes become numbers; each is unpacked once for all M = query tokens x query heads of its KV head. M is the free
width of the product: three tokens of 16 heads are 32 + 16 columns, nothing is padded.

Work is cut evenly: all tiles of N tokens, of all sequences one after another, go to P programs in P runs. A run of one
program that touches sequence b leaves a partial result at place p + b, which belongs to no other pair. Lengths are
read on the device, so a captured CUDA graph serves any lengths.
"""

# Triton has no unpacking in tuples and no conditional expression on tensors of two types.
# ruff: noqa: RUF005, SIM108

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sparkpin_turboquant.unpack import unpack_3, unpack_4, unpack_8

LOWEST = tl.constexpr(-1.0e30)
"""Stands for minus infinity where a difference of two must not be NaN."""


@triton.jit
def _runs(total, PROGRAMS, SHARE):
    """How many programs work: all, or fewer if each would get fewer than SHARE tiles."""
    return tl.maximum(tl.minimum(PROGRAMS, tl.cdiv(total, SHARE)), 1)


@triton.jit
def _lying(i, WIDTH: tl.constexpr, PAIRS: tl.constexpr):
    """Where number `i` of a product's inner dimension lies in a row of WIDTH bytes; see `_columns`."""
    C: tl.constexpr = 4 if WIDTH % 64 == 0 else (2 if WIDTH % 32 == 0 else 1)
    if PAIRS:
        t = i % 8 // 2
        byte = i // 8 % 2 * 2 + i % 2
    else:
        t = i % 16 // 4
        byte = i % 4
    return i // (16 * C) * (16 * C) + t * (4 * C) + i // 16 % C * 4 + byte


@triton.jit
def _columns(b, PAIRS: tl.constexpr):
    """``b[:, _lying(i)]``: moves no data, as Triton reads the tile from shared memory in the operand's layout.

    For each 16 columns of an operand a thread gives four: neighbours on SM80 and SM12x, two and two on SM90 (PAIRS).
    The order of the inner dimension is free: here 16 bytes as they lie are one thread's share of 64 columns.
    """
    C: tl.constexpr = 4 if b.shape[1] % 64 == 0 else (2 if b.shape[1] % 32 == 0 else 1)
    if PAIRS:
        x = tl.permute(tl.reshape(b, (b.shape[0], b.shape[1] // (16 * C), 4, C, 2, 2)), (0, 1, 3, 4, 2, 5))
    else:
        x = tl.permute(tl.reshape(b, (b.shape[0], b.shape[1] // (16 * C), 4, C, 4)), (0, 1, 3, 2, 4))
    return tl.reshape(x, b.shape)


@triton.jit
def _load_keys(head, within, KEY_BITS: tl.constexpr, D: tl.constexpr):
    """Codes of keys, `head` being where a block's keys start, for `_part`."""
    if KEY_BITS == 8:
        b = tl.load((head + within * D)[:, None] + tl.arange(0, D)[None, :])
        return (b,)
    elif KEY_BITS == 4:
        b = tl.load((head + within * (D // 2))[:, None] + tl.arange(0, D // 2)[None, :])
        return (b,)
    else:
        j = tl.arange(0, D // 4)
        start = head + within * (3 * D // 8)
        b = tl.load(start[:, None] + j[None, :])
        s = tl.load((start + D // 4)[:, None] + (j % (D // 8))[None, :])
        r = tl.broadcast_to((j // (D // 8)).to(tl.uint8)[None, :], b.shape)
        return (b, s, r)


@triton.jit
def _load_values(head, within, VALUE_BITS: tl.constexpr, D: tl.constexpr):
    """Codes of values, `head` being where a block's values start, for `_part`."""
    group = head + (within // 16) * (2 * D * VALUE_BITS) + within % 16
    if VALUE_BITS == 4:
        b = tl.load(group[None, :] + tl.arange(0, D // 2)[:, None] * 16)
        return (b,)
    else:
        j = tl.arange(0, D // 4)
        b = tl.load(group[None, :] + j[:, None] * 16)
        s = tl.load((group + D * 4)[None, :] + (j % (D // 8))[:, None] * 16)
        r = tl.broadcast_to((j // (D // 8)).to(tl.uint8)[:, None], b.shape)
        return (b, s, r)


@triton.jit
def _part(codes, PART: tl.constexpr, BITS: tl.constexpr, PAIRS: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Of D components those from ``PART * D / parts`` on, float16: ``[N, D / parts]`` of keys, transposed of values."""
    b = _columns(codes[0], PAIRS)
    if BITS == 8:
        return unpack_8(b, ASSEMBLY)
    elif BITS == 4:
        return unpack_4(b, PART, ASSEMBLY)
    else:
        return unpack_3(b, _columns(codes[1], PAIRS), _columns(codes[2], PAIRS), PART, ASSEMBLY)


@triton.jit
def _queries(q, rows, is_row, D: tl.constexpr, KEY_BITS: tl.constexpr, PAIRS: tl.constexpr):
    """Rotated queries, `rows` where each starts -> parts ``[D / parts, M]`` of their components."""
    PARTS: tl.constexpr = 1 if KEY_BITS == 8 else (2 if KEY_BITS == 4 else 4)
    j = _lying(tl.arange(0, D // PARTS), D // PARTS, PAIRS)
    parts = ()
    for part in tl.static_range(PARTS):
        at = q + rows[None, :] + (part * (D // PARTS) + j)[:, None]
        parts = parts + (tl.load(at, mask=is_row[None, :], other=0.0),)
    return parts


@triton.jit
def _float16(word):
    """The lower half of each word as a float16 number, widened."""
    return (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _softmax(s, top, total, key_norm, visible, scale):
    """One tile of the running softmax -> probabilities ``[N, M]``, the factor for what came before, new top and total.

    `total` is ``[N, M]``, summed after the last tile: a sum over N in each would cost two barriers.
    """
    s = tl.where(visible, s * (key_norm * scale)[:, None], float("-inf"))
    new = tl.maximum(top, tl.max(s, 0))
    p = tl.exp2(s - new[None, :])
    factor = tl.exp2(top - new)
    return p, factor, new, total * factor[None, :] + p


@triton.jit
def _nothing(VALUE_BITS: tl.constexpr, D: tl.constexpr, M: tl.constexpr):
    PARTS: tl.constexpr = 2 if VALUE_BITS == 4 else 4
    out = ()
    for _ in tl.static_range(PARTS):
        out = out + (tl.zeros((D // PARTS, M), dtype=tl.float32),)
    return out


@triton.jit
def _leave(part, logs, place, sums, top, total, is_row, m, ROWS: tl.constexpr, D: tl.constexpr):
    """A partial result: ``part[place, m]`` ``[D]`` float16, normalised, and ``logs[place, m]``, log2 of its weight."""
    PARTS: tl.constexpr = len(sums)
    j = tl.arange(0, D // PARTS)
    one = 1.0 / tl.maximum(total, 1e-30)
    for c in tl.static_range(PARTS):
        at = part + (place * ROWS + m)[None, :] * D + (c * (D // PARTS) + j)[:, None]
        x = tl.minimum(tl.maximum(sums[c] * one[None, :], -65504.0), 65504.0)
        tl.store(at, x.to(tl.float16), mask=is_row[None, :])
    tl.store(logs + place * ROWS + m, tl.where(total > 0.0, top + tl.log2(total), float("-inf")), mask=is_row)


@triton.jit(
    do_not_specialize=["SEQUENCES", "PROGRAMS", "SHARE", "table_width"],
    do_not_specialize_on_alignment=["table", "lengths", "starts", "owners"],
)
def attend(
    part,
    logs,
    q,
    cache,
    table,
    lengths,
    starts,
    owners,
    scale,
    SEQUENCES,
    PROGRAMS,
    SHARE,
    block_bytes,
    table_width,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    M0: tl.constexpr,
    M1: tl.constexpr,
    D: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOT: tl.constexpr,
    N: tl.constexpr,
    MOST: tl.constexpr,
    STAGES: tl.constexpr,
    OWNERS: tl.constexpr,
    PAIRS: tl.constexpr,
    OVERLAP: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """Attention of up to ROWS = tokens x GROUP queries of each sequence over its cached tokens; partial results.

    Args:
        part, logs: ``[PROGRAMS + SEQUENCES, HEADS, ROWS, D]`` float16, ``[PROGRAMS + SEQUENCES, HEADS, ROWS]`` float32.
        q: ``[T, HEADS * GROUP, D]`` float16, rotated.
        cache: bytes, see `formats.layout`; blocks are block_bytes apart.
        table: ``[requests, table_width]`` block numbers.
        lengths: ``[SEQUENCES]`` cached tokens, the queries' own included.
        starts: ``[SEQUENCES + 1]`` first query of each.
        owners: ``[SEQUENCES]`` the table's row of a sequence, where OWNERS is set.
        scale: of the logits, for exponents to base 2.
        M0, M1: columns that hold the rows; M1 may be 0.
    """
    program = tl.program_id(0)
    head = tl.program_id(1)
    all_ = tl.arange(0, MOST)
    tiles = tl.cdiv(tl.load(lengths + all_, mask=all_ < SEQUENCES, other=0), N)
    total = tl.sum(tiles, 0)
    runs = _runs(total, PROGRAMS, SHARE)
    if program >= runs:
        if OVERLAP:
            gdc_wait()
        return
    first = (program.to(tl.int64) * total // runs).to(tl.int32)
    last = ((program + 1).to(tl.int64) * total // runs).to(tl.int32)
    ends = tl.cumsum(tiles, 0)
    from_ = tl.sum((ends <= first).to(tl.int32), 0)
    to = tl.minimum(tl.sum((ends < last).to(tl.int32), 0), SEQUENCES - 1)
    KEY_BYTES: tl.constexpr = D * KEY_BITS // 8
    VALUES: tl.constexpr = BLOCK * KEY_BYTES
    NORMS: tl.constexpr = VALUES + BLOCK * (D * VALUE_BITS // 8)
    m0 = tl.arange(0, M0)
    if OVERLAP:  # launched before `rotate` has ended, whose queries come next; `merge` waits likewise
        gdc_wait()
        gdc_launch_dependents()
    for b in range(from_, to + 1):
        length = tl.load(lengths + b)
        query = tl.load(starts + b)
        queries = tl.load(starts + b + 1) - query
        before = tl.sum(tl.where(all_ < b, tiles, 0), 0)
        is0 = m0 < tl.minimum(ROWS, queries * GROUP)
        q0 = _queries(
            q, ((query + m0 // GROUP) * (HEADS * GROUP) + head * GROUP + m0 % GROUP) * D, is0, D, KEY_BITS, PAIRS
        )
        last0 = length - queries + m0 // GROUP
        top0 = tl.full((M0,), LOWEST, dtype=tl.float32)
        total0 = tl.zeros((N, M0), dtype=tl.float32)
        sums0 = _nothing(VALUE_BITS, D, M0)
        if M1:
            m1 = M0 + tl.arange(0, M1)
            is1 = m1 < tl.minimum(ROWS, queries * GROUP)
            at1 = ((query + m1 // GROUP) * (HEADS * GROUP) + head * GROUP + m1 % GROUP) * D
            q1 = _queries(q, at1, is1, D, KEY_BITS, PAIRS)
            last1 = length - queries + m1 // GROUP
            top1 = tl.full((M1,), LOWEST, dtype=tl.float32)
            total1 = tl.zeros((N, M1), dtype=tl.float32)
            sums1 = _nothing(VALUE_BITS, D, M1)
        if OWNERS:
            row = table + tl.load(owners + b) * table_width
        else:
            row = table + b * table_width
        for tile in tl.range(
            tl.maximum(first - before, 0), tl.minimum(last - before, tl.cdiv(length, N)), num_stages=STAGES
        ):
            i = tl.arange(0, N)  # the values' tokens, as they lie
            k = _lying(i, N, PAIRS)  # the keys': in the order that the values will have
            if BLOCK % N == 0:
                block = tl.load(row + tile * N // BLOCK).to(tl.int64)
                first_ = tl.multiple_of(tile * N % BLOCK, N)
                here = tl.multiple_of(cache + block * block_bytes + head * (BLOCK * SLOT), 16)
                values = _load_values(here + VALUES, first_ + i, VALUE_BITS, D)
                within = first_ + k
            else:
                n = tile * N + i
                block = tl.load(row + n // BLOCK, mask=n < length, other=0).to(tl.int64)
                there = cache + block * block_bytes + head * (BLOCK * SLOT)
                values = _load_values(there + VALUES, n % BLOCK, VALUE_BITS, D)
                n = tile * N + k
                block = tl.load(row + n // BLOCK, mask=n < length, other=0).to(tl.int64)
                here = cache + block * block_bytes + head * (BLOCK * SLOT)
                within = n % BLOCK
            n = tile * N + k
            keys = _load_keys(here, within, KEY_BITS, D)
            # Key and value norm in one word: what is narrower is not loaded ahead, and a tile would wait for memory.
            pairs = tl.load((here + NORMS + within * 4).to(tl.pointer_type(tl.int32)), mask=n < length, other=0)
            key_norm = _float16(pairs)
            value_norm = _float16(pairs >> 16)
            # Part by part, so that few unpacked numbers are in registers at a time.
            s0 = tl.zeros((N, M0), dtype=tl.float32)
            if M1:
                s1 = tl.zeros((N, M1), dtype=tl.float32)
            for c in tl.static_range(len(q0)):
                key = _part(keys, c, KEY_BITS, PAIRS, ASSEMBLY)
                s0 = tl.dot(key, q0[c], s0)
                if M1:
                    s1 = tl.dot(key, q1[c], s1)
            p0, factor0, top0, total0 = _softmax(s0, top0, total0, key_norm, n[:, None] <= last0[None, :], scale)
            p0 = (p0 * value_norm[:, None]).to(tl.float16)
            old0 = sums0
            sums0 = ()
            if M1:
                p1, factor1, top1, total1 = _softmax(s1, top1, total1, key_norm, n[:, None] <= last1[None, :], scale)
                p1 = (p1 * value_norm[:, None]).to(tl.float16)
                old1 = sums1
                sums1 = ()
            for c in tl.static_range(len(old0)):
                value = _part(values, c, VALUE_BITS, PAIRS, ASSEMBLY)
                sums0 = sums0 + (tl.dot(value, p0, old0[c] * factor0[None, :]),)
                if M1:
                    sums1 = sums1 + (tl.dot(value, p1, old1[c] * factor1[None, :]),)
        place = (program + b).to(tl.int64) * HEADS + head
        _leave(part, logs, place, sums0, top0, tl.sum(total0, 0), is0, m0, ROWS, D)
        if M1:
            _leave(part, logs, place, sums1, top1, tl.sum(total1, 0), is1, m1, ROWS, D)
