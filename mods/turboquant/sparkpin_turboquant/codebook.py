"""The Lloyd-Max quantiser of the standard normal distribution (Max 1960, Lloyd 1982), in float64 and plain Python."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise

BITS = 4
LEVELS = 2**BITS


def _density(t: float) -> float:
    return math.exp(-0.5 * t * t) / math.sqrt(2.0 * math.pi) if math.isfinite(t) else 0.0


def _cumulative(t: float) -> float:
    return 0.5 * math.erfc(-t / math.sqrt(2.0))


def _edges(centroids: list[float]) -> list[float]:
    inner = [(a + b) / 2.0 for a, b in pairwise(centroids)]
    return [-math.inf, *inner, math.inf]


@cache
def lloyd_max() -> tuple[float, ...]:
    """Centroids that minimise the mean squared error for N(0, 1), ascending and symmetric about zero.

    Lloyd's iteration: boundaries half-way between centroids, each centroid the mean of its cell,
    ``(pdf(a) - pdf(b)) / (cdf(b) - cdf(a))``, until no centroid moves by more than 1e-13.
    """
    centroids = [-3.0 + 6.0 * (i + 0.5) / LEVELS for i in range(LEVELS)]
    for _ in range(20_000):
        edges = _edges(centroids)
        moved = [(_density(a) - _density(b)) / (_cumulative(b) - _cumulative(a)) for a, b in pairwise(edges)]
        # Exact symmetry; the iteration alone leaves the two halves apart by rounding.
        moved = [(moved[i] - moved[LEVELS - 1 - i]) / 2.0 for i in range(LEVELS)]
        step = max(abs(a - b) for a, b in zip(moved, centroids, strict=True))
        centroids = moved
        if step < 1e-13:
            return tuple(centroids)
    raise ArithmeticError("Lloyd's iteration has not settled")


@cache
def magnitudes() -> tuple[float, ...]:
    """The 8 positive centroids, ascending, to 8 significant bits, exact in float16 and in bfloat16."""
    split = (math.frexp(c) for c in lloyd_max()[LEVELS // 2 :])
    return tuple(math.ldexp(round(mantissa * 256), exponent - 8) for mantissa, exponent in split)


@cache
def edges() -> tuple[float, ...]:
    """The 7 magnitudes at which the index changes, ascending."""
    return tuple(_edges(list(lloyd_max()))[LEVELS // 2 + 1 : -1])
