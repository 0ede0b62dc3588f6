"""Intervals and false alarms of what is measured a few times. Pure.

`benchmarks/interval_coverage.py` simulates both: how often the intervals hold the truth, and how often a sound server
would be blamed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, pstdev, stdev

FALSE_ALARMS = 0.001  # of the runs of `prove` at sound servers, at most, for any number of sessions and turns
SKEWED = 8
ROUNDING = 1e-9  # of a mean: a smaller spread is that of floating point


def student_t(confidence: float, freedom: int) -> float:
    """The two-sided quantile: Student's t of `freedom` degrees is within it with this chance. Exact for any number."""
    low, high = 0.0, math.pi / 2
    while low < (angle := (low + high) / 2) < high:
        low, high = (angle, high) if chance_within(angle, freedom) < confidence else (low, angle)
    return math.sqrt(freedom) * math.tan(low)


def chance_within(angle: float, freedom: int) -> float:
    """That |t| < sqrt(freedom) * tan(angle): Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    cosine, odd, total = math.cos(angle), freedom % 2, 0.0
    term = cosine if odd else 1.0
    for step in range(1 + odd, freedom, 2):
        total += term
        term *= cosine**2 * step / (step + 1)
    inner = math.sin(angle) * total
    return (angle + inner) * 2 / math.pi if odd else inner


def paired_interval(differences: Sequence[float], confidence: float = 0.95) -> tuple[float, float, float]:
    """Mean, and the low and high end of its interval. differences: of two at least, independent of each other.

    Student's t. From SKEWED figures on by Hall's transformation of it, which allows for a skewed distribution (On the
    removal of skewness by transformation, 1992), and never narrower than Student's t. Fewer say little of their
    skewness.
    """
    count, mean, spread = len(differences), fmean(differences), stdev(differences)
    if spread <= ROUNDING * max(map(abs, differences)):
        return mean, mean, mean
    skewness = count >= SKEWED and fmean((value - mean) ** 3 for value in differences) / pstdev(differences, mean) ** 3
    reach = student_t(confidence, count - 1) / math.sqrt(count)

    def transformed(y: float) -> float:
        if abs(skewness) < ROUNDING:
            return y
        return 3 / skewness * (math.cbrt(1 + skewness * (y - skewness / (6 * count))) - 1)

    down, up = max(reach, transformed(reach)), max(reach, -transformed(-reach))
    return mean, mean - spread * down, mean + spread * up


def false_alarm(beyond: int, tries: int, noise: int) -> float:
    """The chance that `beyond` of `tries` readings, or more, lie above the greatest of `noise` others, where all are
    alike in truth. It holds for every distribution, since it counts ranks alone (a precedence test)."""
    return math.comb(tries, beyond) / math.comb(tries + noise, beyond)
