"""95 % intervals of what was measured on few texts or questions, so that nobody takes noise for a loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from sparkpin.quality.record import Figure

DRAWS = 2000
SEED = 20260101  # the same measurements give the same record
Z = 1.959964


def ratio(
    numerators: Sequence[float], denominators: Sequence[float], shape: Callable[[float], float] = float
) -> Figure:
    """Sum by sum over texts, shaped by a growing function; the interval by drawing whole texts with replacement.

    Tokens of one text are not independent of each other, so the text is the unit. Both releases read the same texts,
    and a numerator is already of the pair.
    """
    above, below = np.array(numerators, float), np.array(denominators, float)
    if not below.sum():
        return Figure(value=shape(0.0), low=shape(0.0), high=shape(0.0))
    drawn = np.random.default_rng(SEED).integers(0, len(above), (DRAWS, len(above)))
    sums = below[drawn].sum(axis=1)
    values = above[drawn].sum(axis=1)[sums > 0] / sums[sums > 0]
    low, high = np.percentile(values, [2.5, 97.5])
    return Figure(value=shape(float(above.sum() / below.sum())), low=shape(float(low)), high=shape(float(high)))


def lost(reference: Sequence[bool], release: Sequence[bool]) -> Figure:
    """Share of the questions that one has right and the other wrong, less those the other way round.

    Bonett and Price's interval for paired shares: a bootstrap over questions on which both agree would have no width.
    """
    count = len(reference)
    if not count:
        return Figure(value=0.0, low=0.0, high=0.0)
    worse = sum(a and not b for a, b in zip(reference, release, strict=True))
    better = sum(b and not a for a, b in zip(reference, release, strict=True))
    p, q = (worse + 1) / (count + 2), (better + 1) / (count + 2)
    half = Z * math.sqrt((p + q - (p - q) ** 2) / (count + 2))
    return Figure(value=(worse - better) / count, low=max(-1.0, p - q - half), high=min(1.0, p - q + half))
