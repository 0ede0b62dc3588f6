"""Codes to float16 numbers, in Triton: the inner part of the attention kernel.

A code is a sign (its highest bit) and the index of a magnitude, so a table of eight float16 magnitudes is four
registers: their high bytes and their low bytes, of which ``prmt`` picks four at a time.
"""

# Triton decides an if on constants while it compiles; a conditional expression would need both values.
# ruff: noqa: SIM108

from __future__ import annotations

import struct

import triton
import triton.language as tl

from sparkpin_turboquant.codebook import magnitudes

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Triton's interpreter has no inline assembly: there the same numbers come from comparisons."""


def _tables(bits: int) -> str:
    """t0, t1: high bytes of the magnitudes 0 to 3 and 4 to 7; t2, t3: their low bytes."""
    encoded = [struct.pack("<e", m) for m in magnitudes(bits)]
    encoded += [b"\0\0"] * (8 - len(encoded))
    words = [bytes(pair[byte] for pair in encoded[i : i + 4]) for byte in (1, 0) for i in (0, 4)]
    return " ".join(f"mov.b32 t{i}, {int.from_bytes(word, 'little')};" for i, word in enumerate(words))


def _look_up(bits: int, word: str, high: bool) -> str:
    """Assembly: four bytes of two codes in `word` -> $0, $1: the numbers of the low or of the high codes, in order."""
    pick, shift = ("0x7351", "") if high else ("0x6240", "shl.b32 x, x, 4; shl.b32 y, y, 4;")
    return f"""{_tables(bits)}
        and.b32 a, {word}, 0x77777777;
        shr.u32 b, a, 16;
        prmt.b32 h0, t0, t1, a;
        prmt.b32 l0, t2, t3, a;
        prmt.b32 h1, t0, t1, b;
        prmt.b32 l1, t2, t3, b;
        mov.b32 z, 0;
        prmt.b32 x, {word}, z, 0x1404;
        prmt.b32 y, {word}, z, 0x3424;
        {shift}
        prmt.b32 h0, l0, h0, {pick};
        prmt.b32 h1, l1, h1, {pick};
        lop3.b32 $0, h0, x, 0x80008000, 0xF8;
        lop3.b32 $1, h1, y, 0x80008000, 0xF8;"""


REGISTERS = ".reg .b32 a, b, h0, l0, h1, l1, x, y, z, v, w, t0, t1, t2, t3;"


def _assembly_4(high: bool) -> str:
    return f"{{ {REGISTERS} {_look_up(4, '$2', high)} }}"


def _assembly_3(quarter: int) -> str:
    """$2: bytes of four indices; $3: bytes of eight signs; $4: 0 or 1, which half of the signs."""
    odd = quarter % 2
    return f"""{{ {REGISTERS}
        and.b32 v, $4, 1;
        shr.u32 v, $3, v;
        shl.b32 w, v, {1 if odd else 3};
        and.b32 w, w, 0x88888888;
        shr.u32 v, $2, {2 if odd else 0};
        lop3.b32 w, v, 0x33333333, w, 0xEA;
        {_look_up(3, "w", quarter >= 2)} }}"""


# One result each, although both need most of the same steps: Triton lets an operation with several results leave a
# product's operand layout, through shared memory. What the two have in common ptxas computes once.
LOW_4, HIGH_4 = tl.constexpr(_assembly_4(False)), tl.constexpr(_assembly_4(True))
QUARTERS_3 = tl.constexpr(tuple(_assembly_3(quarter) for quarter in range(4)))
M4 = tl.constexpr(magnitudes(4))
M3 = tl.constexpr(magnitudes(3))


@triton.jit
def _signed(index, negative, BITS: tl.constexpr):
    """Index of a magnitude and whether it is negative -> float16, by comparisons; for the interpreter."""
    value = tl.zeros(index.shape, dtype=tl.float32)
    for i in tl.static_range(2 ** (BITS - 1)):
        if BITS == 4:
            value = tl.where(index == i, M4[i], value)
        else:
            value = tl.where(index == i, M3[i], value)
    return tl.where(negative, -value, value).to(tl.float16)


@triton.jit
def unpack_4(b, PART: tl.constexpr, ASSEMBLY: tl.constexpr):
    """``b`` uint8 -> float16 of its low codes (PART 0) or its high ones (PART 1), in b's shape."""
    if not ASSEMBLY:
        c = b.to(tl.int32) >> (4 * PART)
        return _signed(c & 7, (c & 8) != 0, 4)
    elif PART == 0:
        return tl.inline_asm_elementwise(LOW_4, "=&r,=&r,r", [b], dtype=tl.float16, is_pure=True, pack=4)
    else:
        return tl.inline_asm_elementwise(HIGH_4, "=&r,=&r,r", [b], dtype=tl.float16, is_pure=True, pack=4)


@triton.jit
def unpack_3(b, s, r, PART: tl.constexpr, ASSEMBLY: tl.constexpr):
    """``b`` uint8: four indices a byte; ``s`` uint8: their signs in bits r, 2 + r, 4 + r, 6 + r -> float16.

    PART: which of the four.

    r is 0 or 1 in each byte, the same for four neighbours.
    """
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            QUARTERS_3[PART], "=&r,=&r,r,r,r", [b, s, r], dtype=tl.float16, is_pure=True, pack=4
        )
    else:
        c = b.to(tl.int32) >> (2 * PART)
        n = s.to(tl.int32) >> (r.to(tl.int32) + 2 * PART)
        return _signed(c & 3, (n & 1) != 0, 3)


@triton.jit
def unpack_8(b, ASSEMBLY: tl.constexpr):
    """``b``: the bits of int8, as uint8 -> float16. ``0x6400 | u`` is the float16 number 1024 + u, here u = b + 128."""
    if ASSEMBLY:
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
            "=&r,=&r,r",
            [b],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    else:
        return b.to(tl.int8, bitcast=True).to(tl.float16)
