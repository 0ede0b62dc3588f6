"""Two releases in turns, ABBA and so on: both servers at once where memory allows, else one after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from sparkpin.core.errors import SparkpinError
from sparkpin.core.files import write_json
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say
from sparkpin.host.machine import HOST_RESERVE
from sparkpin.measure.bench import record
from sparkpin.measure.bench.plan import BenchPlan
from sparkpin.measure.bench.ratios import INTERVAL, ONE_ROUND, order_of, ratios_of
from sparkpin.measure.bench.record import CellResult, Comparison, Conditions
from sparkpin.measure.bench.run import BenchPlace, turn
from sparkpin.measure.bench.target import BenchSubject, BenchTarget, started
from sparkpin.releases.record import Release, now
from sparkpin.serve import memory_limit
from sparkpin.smoke.server import alone


def compare(
    place: BenchPlace, subjects: tuple[BenchSubject, BenchSubject], plan: BenchPlan, rounds: int, *, keep: bool = True
) -> Comparison:
    """Measure and keep with both releases. Nothing is kept of a comparison that was broken off. keep: not for a
    release that has no record."""
    order = order_of(rounds)

    def server_of(letter: str) -> contextlib.AbstractContextManager[BenchTarget]:
        return started(place.paths, place.engine, subjects["AB".index(letter)])

    conditions: dict[str, Conditions] = {}
    rows: dict[str, list[list[CellResult]]] = {"A": [], "B": []}  # of each turn
    with alone(place.paths, place.engine), contextlib.ExitStack() as stack:
        both = fit_at_once(place.paths, [subject.release for subject in subjects])
        if both:
            say("memory is enough for both servers: both are up, and one at a time is asked")
        else:
            say("memory is not enough for both servers: each turn starts its own")
        up = {letter: stack.enter_context(server_of(letter)) for letter in "AB"} if both else {}
        for number, letter in enumerate(order, start=1):
            say(f"turn {number} of {len(order)}: {letter}")
            with contextlib.nullcontext(up[letter]) if both else server_of(letter) as server:
                done = list(turn(place, server, plan))
            conditions.setdefault(letter, done[0][0])
            rows[letter].append([row for _, row in done])
    made = Comparison(
        time=now(),
        a=conditions["A"],
        b=conditions["B"],
        order=order,
        restarted=not both,
        failed=sum(row.failed for turns in rows.values() for one in turns for row in one),
        ratios=ratios_of(rows["A"], rows["B"]),
        interval=INTERVAL.format(rounds) if rounds > 1 else ONE_ROUND,
    )
    for subject in subjects if keep else ():
        path = record.folder(place.paths, subject.release) / f"{record.COMPARE}{record.file_name(made.time)}"
        write_json(path, record.to_json(made))
        say(f"kept: {path}")
    return made


def fit_at_once(paths: Paths, releases: Sequence[Release]) -> bool:
    """By the memory plans of all. With a GPU each keeps the same bytes for the machine. Without plans nobody knows, and
    one at a time is safe."""
    try:
        plans = [memory_limit.plan_of(paths, release) for release in releases]
    except SparkpinError:
        return False
    shared = HOST_RESERVE * sum(plan.settings.platform == "cuda" for plan in plans[1:])
    return sum(plan.needed + memory_limit.SLACK for plan in plans) - shared <= memory_limit.available()
