"""How often the 95 % intervals of `invoke quality` hold the truth, for made-up losses whose truth is known.

    .venv/bin/python benchmarks/interval_coverage.py [--trials 4000]

Every trial draws the texts of one measurement: their lengths, and a loss a token that differs from text to text as
`LOSSES` says. The same seed gives the same table (docs/quality.md). A part of it is a test
(tests/unit/measure/test_quality.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparkpin.measure.quality import intervals
from sparkpin.measure.quality.compare import CHANGE, NATS, SHARE

SEED = 9
TOKENS = (110, 300)  # of a text
SIZES = {23: "all texts", 8: "`--quick`", 6: "a kind", 5: "a kind", 2: "a kind, `--quick`"}
Draw = Callable[[np.random.Generator, NDArray[np.float64]], NDArray[np.float64]]


@dataclass(frozen=True)
class Loss:
    """truth: the ratio over all texts that there could be; sums: tokens of each text -> the numerator of each."""

    name: str
    truth: float
    span: tuple[float, float]
    sums: Draw


def log_normal(sigma: float) -> Loss:
    truth = float(np.exp(sigma**2 / 2)) / 100
    return Loss(f"log-normal, sigma {sigma:g}", truth, NATS, lambda rng, n: n * rng.lognormal(0, sigma, len(n)) / 100)


LOSSES = (
    log_normal(0.3),
    log_normal(0.6),
    log_normal(1.0),
    Loss("exponential", 0.01, NATS, lambda rng, n: n * rng.exponential(0.01, len(n))),
    Loss("normal, either sign", 0.004, CHANGE, lambda rng, n: n * rng.normal(0.004, 0.01, len(n))),
    Loss("shares near 1", 30 / 31.5, SHARE, lambda rng, n: rng.binomial(n.astype(int), rng.beta(30, 1.5, len(n)))),
    Loss("shares of all sizes", 2 / 3.2, SHARE, lambda rng, n: n * rng.beta(2, 1.2, len(n))),
)


@dataclass(frozen=True)
class Coverage:
    """held: share of the intervals that hold the truth; width: their median width by the truth."""

    held: float
    width: float


def coverage(loss: Loss, texts: int, trials: int) -> Coverage:
    rng = np.random.default_rng([SEED, texts])
    held, widths = 0, []
    for _ in range(trials):
        tokens = rng.integers(*TOKENS, texts).astype(float)
        figure = intervals.ratio(loss.sums(rng, tokens).tolist(), tokens.tolist(), loss.span)
        held += figure.low <= loss.truth <= figure.high
        widths.append((figure.high - figure.low) / loss.truth)
    return Coverage(held / trials, float(np.median(widths)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=4000)
    trials = parser.parse_args().trials
    print(f"| what differs from text to text | {' | '.join(f'{n} texts ({what})' for n, what in SIZES.items())} |")
    print(f"|{'---|' * (len(SIZES) + 1)}")
    for loss in LOSSES:
        found = [coverage(loss, texts, trials) for texts in SIZES]
        print(f"| {loss.name} | {' | '.join(f'{one.held:.1%}, {one.width:.2g}' for one in found)} |", flush=True)


if __name__ == "__main__":
    main()
