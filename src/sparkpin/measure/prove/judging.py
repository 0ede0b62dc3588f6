"""How far two readings of one prompt are apart, and from which distance on that is no rounding. Pure.

A distance is sqrt(2 KL), the KL averaged over the tokens that were said until the two part: of small differences it is
about their standard deviation, in nats. The bound comes from readings that must be the same but for rounding: each
prompt cold and alone, and cold among others. If the logarithms are normal and exact, one sound run of a hundred passes
it, all comparisons of a run together. In a simulation with 12 readings it was fewer than 6 of a hundred. Where some
readings are alike to the bit and others are not, the logarithms are far apart and the bound says nothing: it is never
more than what other text does (verdict.bounds).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, median

import numpy as np

from sparkpin.measure.quality.asking import TOP
from sparkpin.measure.quality.distance import Rows, kl, until_they_part
from sparkpin.measure.student_t import t_beyond

ALARMS = 0.01  # of sound runs that may say that something was found
LEAST = 0.05  # nats: smaller differences are never told. A trained model on a CPU may be further off: docs/prove.md
ALIKE_TO_THE_BIT = 0.003  # nats: stands for a smaller distance, which has no logarithm
ALIKE = 0.3  # at least so much do logarithms of distances differ
SCALE = 1 / NormalDist().inv_cdf(0.75)  # of a median absolute deviation, to a standard deviation
FARTHEST = 20.0  # nats: of an answer from one that has no token at all
MOVED = 0.1  # nats: other text has to move the answers so much, or the model is blind to its context
IN_CACHE = 1 / 8  # one with answers in the cache, where nobody can see how far reading and decoding differ


def distance(one: Rows, other: Rows) -> float:
    """In nats. Rows of answers to the same prompt."""
    count, _ = until_they_part(one, other)
    if not count:
        return 0.0 if len(one) == len(other) else FARTHEST
    return float(np.sqrt(2 * kl(one.first(count), other.first(count), TOP).mean()))


def bound(floor: Sequence[float], tests: int) -> float:
    """From which distance on one of `tests` distances is no chance. By median and median deviation: a few readings of
    `floor` may be damaged themselves."""
    if len(floor) < 2:
        return math.inf
    logs = [math.log(max(value, ALIKE_TO_THE_BIT)) for value in floor]
    middle = median(logs)
    spread = max(ALIKE, SCALE * median(abs(value - middle) for value in logs))
    # The median of n is by sqrt(pi / 2) less sure than their mean.
    t = t_beyond(ALARMS / max(tests, 1), len(logs) - 1) * math.sqrt(1 + math.pi / (2 * len(logs)))
    return max(LEAST, math.exp(middle + t * spread))


def is_blind(control: Sequence[float]) -> bool:
    """control: what other text in the first third of a prompt does to the answers, in nats."""
    return not control or median(control) < MOVED


def is_unstable(floor: Sequence[float], control: Sequence[float]) -> bool:
    """Whether rounding alone does half of what other text does: nothing can be told of the numbers then."""
    return len(floor) < 2 or not max(floor) < median(control) / 2
