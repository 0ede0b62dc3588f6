"""Two releases in turns, ABBA and so on: both servers at once where memory allows, else one after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from sparkpin.core.errors import SparkpinError
from sparkpin.core.files import write_json
from sparkpin.core.paths import Paths
from sparkpin.measure.bench import record
from sparkpin.measure.bench.plan import BenchPlan
from sparkpin.measure.bench.ratios import INTERVAL, ONE_ROUND, order_of, ratios_of
from sparkpin.measure.bench.record import CellResult, Comparison, Conditions
from sparkpin.measure.bench.run import BenchPlace, turn
from sparkpin.measure.bench.target import BenchSubject, BenchTarget, alone, started
from sparkpin.releases.record import Release, now
from sparkpin.serve import memory_limit

Side = tuple[Conditions, list[CellResult]]


def compare(place: BenchPlace, subjects: tuple[BenchSubject, BenchSubject], plan: BenchPlan, rounds: int) -> Comparison:
    """Measure and keep with both releases. Nothing is kept of a comparison that was broken off."""
    order = order_of(rounds)
    with alone(place.paths, place.engine, place.say), contextlib.ExitStack() as stack:
        both = fit_at_once(place.paths, [subject.release for subject in subjects])
        up: dict[str, BenchTarget] = {}
        if both:
            place.say("memory is enough for both servers: both are up, and one at a time is asked")
            for letter, subject in zip("AB", subjects, strict=True):
                up[letter] = stack.enter_context(started(place.paths, place.engine, subject, place.say))
        else:
            place.say("memory is not enough for both servers: each turn starts its own")
        turns: list[tuple[str, Side]] = []
        for number, letter in enumerate(order, start=1):
            place.say(f"turn {number} of {len(order)}: {letter}")
            if both:
                turns.append((letter, side_of(place, up[letter], plan)))
            else:
                with started(place.paths, place.engine, subjects["AB".index(letter)], place.say) as server:
                    turns.append((letter, side_of(place, server, plan)))
    a, b = ([side for letter, side in turns if letter == wanted] for wanted in "AB")
    made = Comparison(
        time=now(),
        a=a[0][0],
        b=b[0][0],
        order=order,
        restarted=not both,
        failed=sum(row.failed for _, (_, rows) in turns for row in rows),
        ratios=ratios_of([rows for _, rows in a], [rows for _, rows in b]),
        interval=INTERVAL.format(rounds) if rounds > 1 else ONE_ROUND,
    )
    for subject in subjects:
        keep(place, subject.release, made)
    return made


def side_of(place: BenchPlace, server: BenchTarget, plan: BenchPlan) -> Side:
    rows = list(turn(place, server, plan))
    return rows[0][0], [row for _, row in rows]


def fit_at_once(paths: Paths, releases: Sequence[Release]) -> bool:
    """By the memory plans of all. Without plans nobody knows, and one at a time is safe."""
    try:
        needed = sum(memory_limit.plan_of(paths, release).needed for release in releases)
    except SparkpinError:
        return False
    return needed + len(releases) * memory_limit.SLACK + memory_limit.HOST_RESERVE <= memory_limit.available()


def keep(place: BenchPlace, release: Release, made: Comparison) -> None:
    path = record.folder(place.paths, release) / f"{record.COMPARE}{record.file_name(made.time)}"
    write_json(path, record.to_json(made))
    place.say(f"kept: {path}")
