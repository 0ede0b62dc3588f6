"""Intervals and false alarms: exact values, and what a simulation of them gives."""

from __future__ import annotations

import math
import random
from statistics import stdev

import pytest

from benchmarks.interval_coverage import LOSSES, Loss, coverage
from sparkpin.measure.prove import run, verdict
from sparkpin.measure.statistics import FALSE_ALARMS, false_alarm, paired_interval, student_t


@pytest.mark.parametrize(
    ("confidence", "freedom", "quantile"),
    [(0.95, 1, 12.7062), (0.998, 1, 318.3088), (0.95, 2, 4.30265), (0.998, 2, 22.32712), (0.95, 3, 3.18245),
     (0.95, 10, 2.22814), (0.998, 11, 4.0247), (0.99, 30, 2.75), (0.95, 120, 1.97993)],
)  # fmt: skip
def test_quantiles_are_those_of_published_tables(confidence: float, freedom: int, quantile: float) -> None:
    assert student_t(confidence, freedom) == pytest.approx(quantile, rel=1e-5)


def test_an_interval_is_never_narrower_than_students() -> None:
    tail = [1.0, 2.0, 3.0, 4.0, 2.0, 1.0, 3.0, 40.0]
    for skewed in (tail, [-one for one in tail], tail[3:], [1.0, 3.0]):
        mean, low, high = paired_interval(skewed)
        half = student_t(0.95, len(skewed) - 1) * stdev(skewed) / math.sqrt(len(skewed))
        assert low <= mean - half + 1e-9 and high >= mean + half - 1e-9
        assert (high - low > 2.1 * half) == (len(skewed) == 8), "few say little of their skewness"
    mean, low, high = paired_interval(tail)
    assert high - mean > 1.2 * (mean - low), "the long tail may hold more"
    assert paired_interval([0.3] * 4) == (0.3, 0.3, 0.3)
    assert paired_interval([1.0, 2.0, 4.0], 0.99)[2] > paired_interval([1.0, 2.0, 4.0])[2]


@pytest.mark.parametrize("texts", [23, 8])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_intervals_hold_the_truth_about_as_often_as_they_say(loss: Loss, texts: int) -> None:
    trials = 250
    least = 0.95 if texts > 8 else 0.93
    assert coverage(loss, texts, trials).held >= least - 3 * math.sqrt(least * (1 - least) / trials)


@pytest.mark.parametrize("sigma", [0.0, 0.5, 3.0])
def test_a_rank_is_no_news_of_readings_that_are_alike(sigma: float) -> None:
    """For any distribution, also one that is often the same to the bit."""
    chance, runs, alarms = random.Random(3), 20_000, 0
    for _ in range(runs):
        readings = [max(0.0, chance.gauss(0, sigma)) if sigma < 1 else math.exp(chance.gauss(0, sigma)) for _ in "1234"]
        alarms += min(readings[:2]) > max(readings[2:])
    assert alarms / runs <= false_alarm(2, 2, 2) + 0.01 == 1 / 6 + 0.01


def test_ways_that_are_tried_share_the_false_alarms() -> None:
    assert false_alarm(0, 9, 9) == 1.0 and false_alarm(9, 9, 9) == pytest.approx(1 / 48620)
    rate = len(run.TRIED) * false_alarm(verdict.SHOWN, verdict.TRIES, verdict.NOISE)
    assert rate <= FALSE_ALARMS < len(run.TRIED) * false_alarm(verdict.SHOWN - 1, verdict.TRIES, verdict.NOISE)
