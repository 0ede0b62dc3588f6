"""One release measured, or two in turns."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import geometric_mean, median
from typing import Any

from sparkpin.build.make import checkpoint_of
from sparkpin.core.errors import BusyError, SmokeError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say
from sparkpin.host import machine
from sparkpin.host.engine import Engine, engine_errors
from sparkpin.host.fingerprint import read_fingerprint
from sparkpin.host.machine import read_gpus
from sparkpin.measure.bench import record
from sparkpin.measure.bench.load import BenchTarget, measure_cells
from sparkpin.measure.bench.plan import BenchPlan, make_plan
from sparkpin.measure.bench.record import BenchRecord, CellResult, Comparison, Conditions, Ratio
from sparkpin.measure.own_server import REQUEST_SECONDS, own_server
from sparkpin.measure.statistics import paired_interval
from sparkpin.memory.inputs import read_inputs
from sparkpin.memory.plan import SPARK_BANDWIDTH
from sparkpin.pins import manifests
from sparkpin.pins.vllm_flags import served_name
from sparkpin.releases.kept_inputs import project_of
from sparkpin.releases.record import Release, now
from sparkpin.releases.runs_here import uses_gpu
from sparkpin.serve import served
from sparkpin.serve.address import key_of
from sparkpin.serve.proxy import requests_under_way
from sparkpin.smoke.answers import Wrong, json_of
from sparkpin.smoke.client import Fault
from sparkpin.smoke.server import exclusive_run

ALL = "the prompts together"
METRICS = ("output_rate", "decode_rate", "ttft")


def plan_for(paths: Paths, release: Release, *, quick: bool = False) -> BenchPlan:
    config = json.loads((checkpoint_of(paths, release) / "config.json").read_text(encoding="utf-8"))
    tokens = int((config.get("text_config") or config).get("max_position_embeddings", 0))
    return make_plan(release.argv, tokens, quick=quick, ignore_eos=release.demands.scripted)


def bench(paths: Paths, engine: Engine, release: Release, plan: BenchPlan) -> BenchRecord:
    """Measure the cells of a plan and keep the record.

    Raises:
        BusyError: the release is served, and answers others.
        HostError: its memory plan needs more than is free.
        SmokeError: its server did not start, or ended.
    """
    gpus = uses_gpu(paths, release)
    rows, slowed = list[CellResult](), dict[str, None]()
    with target_of(paths, engine, release) as target:
        for row in measure_cells(target, plan, 0):
            rows.append(row)
            slowed |= dict.fromkeys(reason for gpu in (read_gpus() if gpus else ()) for reason in gpu.slowed)
        with engine_errors():
            stats = target.container.stats(stream=False, one_shot=True)
        conditions = conditions_of(engine, target)
    measured = BenchRecord(
        timestamp=now(),
        model=served_name(release.argv),
        max_concurrency=max(row.concurrency for row in rows),
        benchmarks=tuple(rows),
        conditions=conditions,
        start_seconds=target.start_seconds,
        memory=container_bytes(stats),
        slowed=tuple(slowed),
        ceiling=ceiling_of(paths, release, rows) if machine.read_host().is_spark else None,
    )
    say(f"kept: {record.save(paths, release, measured)}")
    return measured


def compare(
    paths: Paths, engine: Engine, releases: Sequence[Release], plan: BenchPlan, rounds: int, *, save: bool = True
) -> Comparison:
    """Measure two releases in turns, each with a server of its own, so that the intervals cover differences from start
    to start. The result is kept with both, and nothing of a comparison that was broken off. save: not for a release
    that has no record."""
    order = order_of(rounds)
    conditions: dict[str, Conditions] = {}
    rows: dict[str, list[list[CellResult]]] = {"A": [], "B": []}  # of each turn
    for number, letter in enumerate(order, start=1):
        say(f"turn {number} of {len(order)}: {letter}")
        with own_target(paths, engine, releases["AB".index(letter)]) as target:
            rows[letter].append(list(measure_cells(target, plan, len(rows[letter]))))
            conditions[letter] = conditions_of(engine, target)
    measured = Comparison(
        timestamp=now(),
        a=conditions["A"],
        b=conditions["B"],
        order=order,
        failed=sum(row.failed for turns in rows.values() for one in turns for row in one),
        ratios=ratios_of(rows["A"], rows["B"]),
    )
    for release in releases if save else ():
        say(f"kept: {record.save(paths, release, measured)}")
    return measured


@contextlib.contextmanager
def target_of(paths: Paths, engine: Engine, release: Release) -> Iterator[BenchTarget]:
    """The release's service, asked by its proxy, which goes on afterwards; else a server of its own, which ends."""
    container = served.find(engine, served.name_of(paths, release.recipe))
    known = served.describe(engine, container) if container else None
    if known is None or known.proxy is None or known.release != release.tag or not known.ready:
        with own_target(paths, engine, release) as target:
            yield target
        return
    say(f"{release.tag} is being served: that server is measured, and not restarted")
    if (under_way := requests_under_way(known.proxy)) != 0:
        answers = "cannot tell whether it answers" if under_way is None else f"answers {under_way} requests of"
        raise BusyError(
            f"{known.container} {answers} others, which a benchmark would measure as well",
            next_step="wait until they are done, or invoke stop and then the same command again",
        )
    key = key_of(paths, release.recipe, known.address)
    with exclusive_run(paths, engine), served.client_of(known, key, REQUEST_SECONDS) as client:
        try:
            yield BenchTarget(release, known.server, client, None)
        except (Wrong, Fault) as fault:
            raise SmokeError(f"{release.tag}: {fault}", next_step="invoke status, invoke logs") from None


@contextlib.contextmanager
def own_target(paths: Paths, engine: Engine, release: Release) -> Iterator[BenchTarget]:
    with own_server(paths, engine, release) as (server, client):
        yield BenchTarget(release, next(iter(server.containers)), client, server.start_seconds)


def conditions_of(engine: Engine, target: BenchTarget) -> Conditions:
    release = target.release
    return Conditions(
        release=release.tag,
        image=release.image,
        host=read_fingerprint(engine.version),
        vllm=str(json_of(target.client.get("/version"))["version"]),
        argv=release.argv,
        env=release.env,
        server="served" if target.start_seconds is None else "started",
    )


def container_bytes(stats: Any) -> int | None:
    """As `docker stats` counts: without files that the kernel may drop."""
    memory = stats.get("memory_stats") or {}
    return int(memory["usage"] - memory["stats"]["inactive_file"]) if "usage" in memory else None


def ceiling_of(paths: Paths, release: Release, rows: Sequence[CellResult]) -> float | None:
    """Of a Spark, with the acceptance and context of the five prompts. None where none of them was measured, or,
    with the reason printed, where the pins that the release was made from do not allow one."""
    prompts = [row for row in rows if row.kind == "prompt"]
    if not prompts:
        return None
    context = int(median(row.prompt_size + row.output_tokens / row.completed / 2 for row in prompts))
    drafted, accepted = (sum(getattr(row, name) or 0 for row in prompts) for name in ("drafted", "accepted"))
    try:
        with project_of(paths, release) as project:  # as it was made, whatever the pins are by now
            recipe = manifests.load_recipe(project, release.recipe)
            stack = manifests.load_stack(project, release.stack)
            chain = manifests.load_chain(project, release.stage)
            step = read_inputs(replace(paths, project=project), recipe, stack, chain).step(context)
        if step.unknown:
            say(f"the ceiling counts the weights alone: {step.unknown}")
        return step.ceiling(SPARK_BANDWIDTH, accepted / drafted if drafted else 0.0)
    except SparkpinError as error:
        say(f"no ceiling: {error.message}")
        return None


def order_of(rounds: int) -> str:
    """ABBA and so on, because machines drift: each round has one turn of both, and only figures of one round are
    divided by each other."""
    return "".join("BA" if number % 2 else "AB" for number in range(rounds))


def ratios_of(a: Sequence[Sequence[CellResult]], b: Sequence[Sequence[CellResult]]) -> tuple[Ratio, ...]:
    """a, b: the cells of each round, in the same order. The prompts come together first, then each cell by itself. A
    metric that a cell of either side lacks in any round is left out."""
    sides = [[{row.name: row for row in one} for one in side] for side in (a, b)]
    prompts = {ALL: [row.name for row in a[0] if row.kind == "prompt"]}
    found = list[Ratio]()
    for group, names in ((prompts if prompts[ALL] else {}) | {row.name: [row.name] for row in a[0]}).items():
        for metric in METRICS:
            figures = [[[getattr(one[name], metric) for name in names] for one in side] for side in sides]
            if all(value for side in figures for one in side for value in one):
                found.append(ratio(group, metric, *([geometric_mean(one) for one in side] for side in figures)))
    return tuple(found)


def ratio(cell: str, metric: str, a: Sequence[float], b: Sequence[float]) -> Ratio:
    """a, b: one figure of each round. The interval is of the logarithms of their ratios."""
    logs = [math.log(right / left) for left, right in zip(a, b, strict=True)]
    middle, low, high = map(math.exp, paired_interval(logs)) if len(logs) > 1 else (math.exp(logs[0]), None, None)
    return Ratio(cell=cell, metric=metric, a=tuple(a), b=tuple(b), ratio=middle, low=low, high=high)
