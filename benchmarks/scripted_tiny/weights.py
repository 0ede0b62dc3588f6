"""Weights as bytes, and their encodings: BF16, AutoRound INT4, block-scaled FP8. Standard library only.

A weight is one of 256 odd multiples of a power of two, ``(2 * code - 255) * 2**-exponent``: exact in BF16 and in every
step of the arithmetic below, so that each machine computes the same bytes, and quick, because encoding a row is one
``bytes.translate``.
"""

from __future__ import annotations

import array
import functools
import hashlib
import struct
from dataclasses import dataclass

from benchmarks.scripted_tiny.layout import FP8_MAX, GROUP


@dataclass(frozen=True, slots=True)
class Weights:
    """A matrix ``[rows, cols]`` of codes in row order; each row has its own exponent."""

    rows: int
    cols: int
    codes: bytes
    exponents: tuple[int, ...]

    def row(self, i: int) -> bytes:
        return self.codes[i * self.cols : (i + 1) * self.cols]

    def value(self, i: int, j: int) -> float:
        return (2 * self.codes[i * self.cols + j] - 255) * 2.0 ** -self.exponents[i]

    def bf16(self) -> bytes:
        return to_bf16(self)


def random_weights(seed: str, rows: int, cols: int, exponent: int) -> Weights:
    """Uniform weights from SHAKE-256 of the seed, which no version of Python can change."""
    return Weights(rows, cols, hashlib.shake_256(seed.encode()).digest(rows * cols), (exponent,) * rows)


def bf16(value: float) -> bytes:
    """Round to BF16, ties to even. Little-endian, two bytes."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return struct.pack("<H", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)


def bf16_value(data: bytes) -> float:
    (value,) = struct.unpack("<f", b"\0\0" + data)
    return float(value)


def to_bf16(weights: Weights) -> bytes:
    out = bytearray(2 * len(weights.codes))
    for i, exponent in enumerate(weights.exponents):
        low, high = _bf16_tables(exponent)
        begin, end = 2 * i * weights.cols, 2 * (i + 1) * weights.cols
        out[begin:end:2] = weights.row(i).translate(low)
        out[begin + 1 : end : 2] = weights.row(i).translate(high)
    return bytes(out)


def to_int4(weights: Weights) -> tuple[bytes, bytes]:
    """qweight and scales of AutoRound's auto_gptq packing of ``[N, K]`` (see `layout.int4_parts`), rounded to the
    nearest. K must be a multiple of 128.
    """
    k = weights.cols
    words = array.array("I")
    if words.itemsize != 4:
        raise RuntimeError(f"array('I') has {words.itemsize} bytes an item here, expected 4")
    scales: list[list[bytes]] = [[] for _ in range(k // GROUP)]
    for i, exponent in enumerate(weights.exponents):
        row = weights.row(i)
        for g in range(k // GROUP):
            group = row[g * GROUP : (g + 1) * GROUP]
            scale, table = _int4_table(_peak(group), exponent)
            nibbles = group.translate(table)
            low, high = (int.from_bytes(nibbles[start::2], "little") for start in (0, 1))
            words.frombytes((low | high << 4).to_bytes(GROUP // 2, "little"))
            scales[g].append(scale)
    columns = k // 8
    qweight = b"".join(words[j::columns].tobytes() for j in range(columns))
    return qweight, b"".join(s for group_scales in scales for s in group_scales)


def to_fp8(weights: Weights) -> tuple[bytes, bytes]:
    """E4M3 ``[N, K]``, and BF16 scales of 128 x 128 blocks ``[ceil(N/128), ceil(K/128)]``. Value = E4M3 * scale."""
    out = bytearray(len(weights.codes))
    scales = bytearray()
    for top in range(0, weights.rows, GROUP):
        rows = range(top, min(top + GROUP, weights.rows))
        for left in range(0, weights.cols, GROUP):
            parts = [weights.row(i)[left : left + GROUP] for i in rows]
            peak = max(_peak(p) * 2.0 ** -weights.exponents[i] for i, p in zip(rows, parts, strict=True))
            scale = bf16(peak / FP8_MAX)
            scales += scale
            for i, part in zip(rows, parts, strict=True):
                begin = i * weights.cols + left
                out[begin : begin + len(part)] = part.translate(_fp8_table(scale, weights.exponents[i]))
    return bytes(out), bytes(scales)


def fp8_code(value: float) -> int:
    """Nearest E4M3 byte, ties to the even mantissa, saturating at 448."""
    sign = 0x80 if value < 0 else 0
    magnitude = min(abs(value), FP8_MAX)
    return sign | min(range(0x7F), key=lambda code: (abs(_fp8_magnitudes()[code] - magnitude), code & 1))


@functools.cache
def _fp8_magnitudes() -> tuple[float, ...]:
    """Of the E4M3 bytes (4 exponent bits, 3 mantissa bits, bias 7, no infinity) without a sign."""
    pairs = [divmod(code, 8) for code in range(0x7F)]
    return tuple((8 + m) * 2.0 ** (e - 10) if e else m * 2.0**-9 for e, m in pairs)


def _peak(codes: bytes) -> int:
    """Largest magnitude in units of 2**-exponent."""
    return max(2 * max(codes) - 255, 255 - 2 * min(codes))


@functools.cache
def _bf16_tables(exponent: int) -> tuple[bytes, bytes]:
    encoded = [bf16((2 * code - 255) * 2.0**-exponent) for code in range(256)]
    return bytes(e[0] for e in encoded), bytes(e[1] for e in encoded)


@functools.cache
def _int4_table(peak: int, exponent: int) -> tuple[bytes, bytes]:
    scale = struct.pack("<e", peak * 2.0**-exponent / 7)
    (step,) = struct.unpack("<e", scale)
    return scale, bytes(max(-8, min(7, round((2 * code - 255) * 2.0**-exponent / step))) + 8 for code in range(256))


@functools.cache
def _fp8_table(scale: bytes, exponent: int) -> bytes:
    step = bf16_value(scale)
    return bytes(fp8_code((2 * code - 255) * 2.0**-exponent / step) for code in range(256))
