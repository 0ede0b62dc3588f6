"""How often the intervals of `invoke quality` hold the truth, and how often `invoke prove` blames a sound server.

    .venv/bin/python benchmarks/interval_coverage.py [--trials 4000]

For an interval, every trial draws the texts of one measurement: their lengths, and a loss a token that differs from
text to text as `LOSSES` says. For a false alarm it draws the distances of one run of `prove`, of sound servers whose
rounding is as in `ROUNDINGS`. The same seed gives the same tables (docs/quality.md, docs/prove.md); a part of them is a
test (tests/unit/measure/test_statistics.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparkpin.measure.prove.run import TRIED
from sparkpin.measure.prove.verdict import LEAST, NOISE, SHOWN, TRIES
from sparkpin.measure.quality import compare
from sparkpin.measure.quality.compare import CHANGE, NATS, SHARE

SEED = 9
TOKENS = (110, 300)  # of a text
SIZES = {23: "all texts", 8: "`--quick`", 6: "a kind", 5: "a kind", 2: "a kind, `--quick`"}
Floats = NDArray[np.float64]
Draw = Callable[[np.random.Generator, Floats], Floats]


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
        figure = compare.ratio(loss.sums(rng, tokens).tolist(), tokens.tolist(), loss.span)
        held += figure.low <= loss.truth <= figure.high
        widths.append((figure.high - figure.low) / loss.truth)
    return Coverage(held / trials, float(np.median(widths)))


ROUNDINGS: dict[str, Callable[[np.random.Generator, int], Floats]] = {
    "log-normal, sigma 1": lambda rng, n: 0.05 * rng.lognormal(0, 1, n),
    "log-normal, sigma 3": lambda rng, n: 0.05 * rng.lognormal(0, 3, n),
    "half alike to the bit, else up to 0.4": lambda rng, n: rng.uniform(0, 0.4, n) * rng.integers(0, 2, n),
    "one of 50 is a near tie of 0.2 to 2": lambda rng, n: np.where(rng.random(n) < 0.02, rng.uniform(0.2, 2, n), 0.01),
    "Cauchy": lambda rng, n: np.abs(0.02 * rng.standard_cauchy(n)),
}


def false_alarms(rounding: Callable[[np.random.Generator, int], Floats], answers: int, runs: int) -> float:
    """Share of the runs at a sound server in which a way of `answers` prompts is blamed, all ways together: the one
    furthest off is asked with other words, as `prove` does."""
    rng = np.random.default_rng([SEED, answers])
    alarms = 0
    for _ in range(runs):
        blamed = False
        for _ in TRIED:
            if rounding(rng, answers).max() > LEAST:
                bound = max(LEAST, rounding(rng, NOISE).max())
                blamed |= bool((rounding(rng, TRIES) > bound).sum() >= SHOWN)
        alarms += blamed
    return alarms / runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=4000)
    trials = parser.parse_args().trials
    print(f"| what differs from text to text | {' | '.join(f'{n} texts ({what})' for n, what in SIZES.items())} |")
    print(f"|{'---|' * (len(SIZES) + 1)}")
    for loss in LOSSES:
        found = [coverage(loss, texts, trials) for texts in SIZES]
        print(f"| {loss.name} | {' | '.join(f'{one.held:.1%}, {one.width:.2g}' for one in found)} |", flush=True)
    answers = (2, 12, 100)
    print(f"\n| rounding of a sound server | {' | '.join(f'{count} answers a way' for count in answers)} |")
    print(f"|{'---|' * (len(answers) + 1)}")
    for name, rounding in ROUNDINGS.items():
        rates = [false_alarms(rounding, count, 5 * trials) for count in answers]
        print(f"| {name} | {' | '.join(f'{rate * 1000:.2f}' for rate in rates)} |", flush=True)


if __name__ == "__main__":
    main()
