"""The Lloyd-Max quantiser of the standard normal distribution (Max 1960, Lloyd 1982), in float64 and plain Python."""

from __future__ import annotations

import math
import struct
from functools import cache
from itertools import pairwise

LEVELS = 16


def _density(t: float) -> float:
    return math.exp(-0.5 * t * t) / math.sqrt(2.0 * math.pi) if math.isfinite(t) else 0.0


def _cumulative(t: float) -> float:
    return 0.5 * math.erfc(-t / math.sqrt(2.0))


def _edges(centroids: list[float]) -> list[float]:
    inner = [(a + b) / 2.0 for a, b in pairwise(centroids)]
    return [-math.inf, *inner, math.inf]


@cache
def lloyd_max(levels: int = LEVELS) -> tuple[float, ...]:
    """Centroids that minimise the mean squared error for N(0, 1), ascending and symmetric about zero.

    Lloyd's iteration: boundaries half-way between centroids, each centroid the mean of its cell,
    ``(pdf(a) - pdf(b)) / (cdf(b) - cdf(a))``, until no centroid moves by more than 1e-13.
    """
    centroids = [-3.0 + 6.0 * (i + 0.5) / levels for i in range(levels)]
    for _ in range(20_000):
        edges = _edges(centroids)
        moved = [(_density(a) - _density(b)) / (_cumulative(b) - _cumulative(a)) for a, b in pairwise(edges)]
        # Exact symmetry; the iteration alone leaves the two halves apart by rounding.
        moved = [(moved[i] - moved[levels - 1 - i]) / 2.0 for i in range(levels)]
        step = max(abs(a - b) for a, b in zip(moved, centroids, strict=True))
        centroids = moved
        if step < 1e-13:
            return tuple(centroids)
    raise ArithmeticError(f"Lloyd's iteration for {levels} levels has not settled")


def boundaries(levels: int = LEVELS) -> tuple[float, ...]:
    """The ``levels - 1`` values between neighbouring centroids at which the code changes."""
    return tuple(_edges(list(lloyd_max(levels)))[1:-1])


def distortion(levels: int = LEVELS) -> float:
    """Mean squared error of the quantiser for N(0, 1): ``1 - sum p_i c_i^2``, as each centroid is its cell's mean."""
    centroids = lloyd_max(levels)
    edges = _edges(list(centroids))
    return 1.0 - sum(
        (_cumulative(b) - _cumulative(a)) * c * c for a, b, c in zip(edges, edges[1:], centroids, strict=False)
    )


def _float16(x: float) -> float:
    return float(struct.unpack("<e", struct.pack("<e", x))[0])


BEND = _float16(1.1844e-4)
"""Of the curve of 4 bits, fitted so that the mean squared error is least."""


@cache
def magnitudes(bits: int) -> tuple[float, ...]:
    """The ``2^(bits - 1)`` positive levels, ascending, as the float16 numbers that kernels multiply by.

    2 and 3 bits: Lloyd-Max centroids. 4 bits: ``x + BEND x^5`` for x = 0.5, 1.5 ... 7.5, in float16 arithmetic, each step
    rounded. Up to a common factor, which is the norm's business, this is Lloyd-Max to 0.2 % of the error, and a GPU
    computes it faster than it looks up a table.
    """
    if bits != 4:
        return tuple(_float16(c) for c in lloyd_max(2**bits)[2 ** (bits - 1) :])
    levels = []
    for i in range(8):
        x = i + 0.5
        levels.append(_float16(x * _float16(_float16((x * x) * (x * x)) * BEND + 1.0)))
    return tuple(levels)


@cache
def factor(bits: int) -> float:
    """What the levels are multiplied by to have the least error for N(0, 1); 1 for centroids, but for rounding."""
    levels = magnitudes(bits)
    found = 1.0 if bits != 4 else 0.26
    for _ in range(1000):
        edges_ = [0.0, *((a + b) / 2 * found for a, b in pairwise(levels)), math.inf]
        first = [_density(a) - _density(b) for a, b in pairwise(edges_)]
        mass = [_cumulative(b) - _cumulative(a) for a, b in pairwise(edges_)]
        found = sum(m * c for m, c in zip(first, levels, strict=True)) / sum(
            m * c * c for m, c in zip(mass, levels, strict=True)
        )
    return found


@cache
def edges(bits: int) -> tuple[float, ...]:
    """The ``2^(bits - 1) - 1`` magnitudes at which the index changes, ascending."""
    return tuple((a + b) / 2 * factor(bits) for a, b in pairwise(magnitudes(bits)))


def distortion_of(bits: int) -> float:
    """Mean squared error of the levels for N(0, 1)."""
    levels, scale = magnitudes(bits), factor(bits)
    limits = [0.0, *edges(bits), math.inf]
    kept = 0.0
    for a, b, level in zip(limits, limits[1:], levels, strict=False):
        c = level * scale
        kept += 2.0 * (2.0 * c * (_density(a) - _density(b)) - c * c * (_cumulative(b) - _cumulative(a)))
    return 1.0 - kept
