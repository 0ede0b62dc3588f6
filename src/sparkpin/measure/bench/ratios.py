"""Two releases by their paired ratios. Pure.

Machines drift: they warm up, and others work on them. So A and B take turns, ABBA and so on, and only figures of
neighbouring turns are divided by each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, geometric_mean, stdev

from sparkpin.measure.bench.record import CellResult, Ratio
from sparkpin.measure.student_t import t_975

ALL = "the prompts together"
INTERVAL = "B / A: geometric mean of {} paired ratios, one a round; 95 %: Student's t on their logarithms"
ONE_ROUND = "B / A: of one round; more rounds give an interval (--rounds)"


def order_of(rounds: int) -> str:
    """ABBA and so on: each round has one turn of each."""
    return "".join("BA" if number % 2 else "AB" for number in range(rounds))


def interval(ratios: Sequence[float]) -> tuple[float, float, float]:
    """Geometric mean, low and high end of its 95 % interval. ratios: two at least, independent of each other."""
    logs = [math.log(ratio) for ratio in ratios]
    half = t_975(len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
    return math.exp(fmean(logs)), math.exp(fmean(logs) - half), math.exp(fmean(logs) + half)


def figures(row: CellResult) -> dict[str, float]:
    """Metric -> figure, of those that a cell has. Above 0 all of them, so that they have ratios."""
    found = {
        "output_rate": row.output_rate,
        "decode_rate": row.decode_rate,
        "ttft": row.ttft and row.ttft.p50,
        "token": row.token and row.token.p50,
    }
    return {metric: value for metric, value in found.items() if value}


def ratios_of(a: Sequence[Sequence[CellResult]], b: Sequence[Sequence[CellResult]]) -> tuple[Ratio, ...]:
    """a, b: the cells of each round, in the same order. The prompts come together first, then each cell.

    Of a single prompt only the decode rate. A metric that a cell of either side lacks in any round is left out.
    """
    sides = [[{row.cell.name: figures(row) for row in one} for one in side] for side in (a, b)]
    prompts = [row.cell.name for row in a[0] if row.cell.kind == "prompt"]
    found: list[Ratio] = []
    for metric in ("decode_rate", "output_rate", "ttft", "token"):
        if len(prompts) > 1 and all(metric in one[name] for side in sides for one in side for name in prompts):
            together = [[geometric_mean([one[name][metric] for name in prompts]) for one in side] for side in sides]
            found.append(ratio(ALL, metric, *together))
    for row in a[0]:
        name = row.cell.name
        for metric in ("decode_rate",) if row.cell.kind == "prompt" else ("output_rate", "ttft", "token"):
            if all(metric in one[name] for side in sides for one in side):
                found.append(ratio(name, metric, *([one[name][metric] for one in side] for side in sides)))
    return tuple(found)


def ratio(cell: str, metric: str, a: Sequence[float], b: Sequence[float]) -> Ratio:
    pairs = [right / left for left, right in zip(a, b, strict=True)]
    low: float | None
    high: float | None
    middle, low, high = interval(pairs) if len(pairs) > 1 else (pairs[0], None, None)
    return Ratio(cell=cell, metric=metric, a=tuple(a), b=tuple(b), ratio=middle, low=low, high=high)
