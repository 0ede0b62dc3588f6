"""95 % intervals of what was measured on few texts or questions, so that nobody takes noise for a loss."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from sparkpin.measure.student_t import t_975
from sparkpin.releases.quality_allowance import paired
from sparkpin.releases.quality_record import Figure

DRAWS = 2000
SEED = 20260101  # the same measurements give the same record
FEW = 16  # texts
LEVEL, LEVEL_OF_FEW = 0.97, 0.98
"""Of the bootstrap, so that 95 % are held: of few texts that differ much it holds less than it says
(benchmarks/interval_coverage.py)."""
ALIKE = 1e-9  # of a standard error, against what it would be of texts that differ: rounding, and no spread

Floats = NDArray[np.float64]


def ratio(
    numerators: Sequence[float],
    denominators: Sequence[float],
    span: tuple[float, float],
    shape: Callable[[float], float] = float,
) -> Figure:
    """Sum by sum over texts, shaped by a growing function; the interval is a studentised bootstrap over whole texts.

    Tokens of one text are not independent of each other, so the text is the unit. Both releases read the same texts,
    and a numerator is already of the pair. span: the least and the greatest that the ratio can be, which is all that
    one text says. Never narrower than Student's t: of a few texts that are much alike the draws know little.
    """
    above, below = np.array(numerators, float), np.array(denominators, float)
    above, below = above[below > 0], below[below > 0]
    count = len(above)
    if not count:
        return Figure(value=shape(0.0), low=shape(0.0), high=shape(0.0))
    value, error = (float(one) for one in estimated(above, below))
    if count == 1:
        low, high = span
    elif error <= ALIKE * float(np.abs(above).sum() / below.sum()):
        low = high = value
    else:
        drawn = draws(count)
        values, errors = estimated(above[drawn], below[drawn])
        spread = errors > ALIKE * error  # draws of one text again and again have none
        tail = (1 - (LEVEL_OF_FEW if count < FEW else LEVEL)) / 2
        least = t_975(count - 1)
        down, up = np.quantile((values[spread] - value) / errors[spread], [tail, 1 - tail])
        low = max(span[0], value - error * max(float(up), least))
        high = min(span[1], value + error * max(-float(down), least))
    return Figure(value=shape(value), low=shape(low), high=shape(high))


@functools.cache
def draws(count: int) -> NDArray[np.int64]:
    """[DRAWS, count]: which texts, again and again; the same for each figure of a measurement."""
    return np.random.default_rng(SEED).integers(0, count, (DRAWS, count))


def estimated(above: Floats, below: Floats) -> tuple[Floats, Floats]:
    """above, below: [..., texts]. The ratio of their sums and its standard error, linearised: [...] both; the error of
    one text is 0.
    """
    count = above.shape[-1]
    sums = below.sum(axis=-1)
    values = above.sum(axis=-1) / sums
    rests = above - values[..., None] * below
    return values, np.sqrt((rests**2).sum(axis=-1) * count / max(1, count - 1)) / sums


def lost(reference: Sequence[bool], release: Sequence[bool]) -> Figure:
    """Share of the questions that one has right and the other wrong, less those the other way round."""
    count = len(reference)
    if not count:
        return Figure(value=0.0, low=0.0, high=0.0)
    worse = sum(a and not b for a, b in zip(reference, release, strict=True))
    better = sum(b and not a for a, b in zip(reference, release, strict=True))
    low, high = paired(worse, better, count)
    return Figure(value=(worse - better) / count, low=low, high=high)
