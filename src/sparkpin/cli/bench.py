"""The task `bench`: find release and plan, measure, print, keep."""

from __future__ import annotations

import json as jsons
from collections.abc import Sequence
from typing import Annotated

from sparkpin.build.consistent import require_consistent
from sparkpin.build.make import checkpoint_of
from sparkpin.cli.choose import choose_known, current_of
from sparkpin.cli.options import Json, KnownRecipe
from sparkpin.cli.tasks import task
from sparkpin.core import terminal
from sparkpin.core.errors import InputError
from sparkpin.core.paths import Paths
from sparkpin.host import machine
from sparkpin.host.engine import Engine, engine_of
from sparkpin.measure.bench import compare as comparing
from sparkpin.measure.bench import record, text
from sparkpin.measure.bench import run as running
from sparkpin.measure.bench.plan import BenchParts, BenchPlan, Limits, cells_of
from sparkpin.measure.bench.target import BenchSubject
from sparkpin.releases import container
from sparkpin.releases.record import Release, Releases
from sparkpin.releases.runs_here import obstacle, uses_gpu
from sparkpin.serve.memory.estimates import SPARK_BANDWIDTH
from sparkpin.serve.served import running_release

LONGEST_COMPARED = 1024
ROUNDS = 4
ALL_PARTS = frozenset({"prompt", "sweep"})


@task("measure")
def bench(
    paths: Paths,
    tag: Annotated[str | None, "release to measure (default: the recipe's that is served, else its current)"] = None,
    *,
    recipe: KnownRecipe = None,
    compare: Annotated[str, "measure TAG_A and TAG in turns", "TAG_A"] = "",
    rounds: Annotated[int | None, "of a comparison, a turn of each (default: 4)", "COUNT"] = None,
    quick: Annotated[bool, "short answers and few cells: whether it works at all"] = False,
    full: Annotated[bool, "the cells with many long prompts at a time, too"] = False,
    json: Json = False,
) -> None:
    """Measure how fast a release is, or two in turns.

    invoke bench --quick
    invoke bench --compare v2 v2-tq
    """
    if rounds == 0 or (compare and not tag) or (rounds and not compare):
        how = "--compare A goes with a tag B, and --rounds with both, 1 or more"
        raise InputError(how, next_step=f"invoke bench --compare A B --rounds {ROUNDS}")
    engine, records = engine_of(paths), Releases(paths)
    if not tag:
        tag = running_release(paths, engine, choose_known(paths, recipe)) or current_of(paths, recipe).tag
    releases = [*([records.get(compare)] if compare else []), records.get(tag, recipe)]
    for release in releases:
        require_measurable(paths, engine, release)
    subjects = [subject_of(paths, release) for release in releases]
    plans = [plan_for(subject, quick=quick, everything=full) for subject in subjects]
    plan, turns = (common(plans), rounds or ROUNDS) if compare else (plans[0], 0)
    if not json:
        text.show_plan(releases, plan, turns=max(1, 2 * turns))
    bandwidth = SPARK_BANDWIDTH if machine.read_host().is_spark and not compare else None
    place = running.BenchPlace.here(paths, engine, bandwidth)
    if compare:
        comparison = comparing.compare(place, (subjects[0], subjects[1]), plan, turns)
        terminal.show_json(record.to_json(comparison)) if json else text.show_comparison(comparison)
    else:
        found = running.bench(place, subjects[0], plan)
        terminal.show_json(record.to_json(found)) if json else text.show_record(found)


def require_measurable(paths: Paths, engine: Engine, release: Release) -> None:
    require_consistent(paths, release)
    container.require_here(engine)
    if why := obstacle(paths, engine, release):
        raise InputError(f"{release.tag} cannot be measured here: {why}", next_step="measure it where it can be served")
    if not release.smoke_passed:
        terminal.say(f"warning: {release.tag} is {release.state}: no smoke test stands behind its answers")


def subject_of(paths: Paths, release: Release) -> BenchSubject:
    return BenchSubject(release, checkpoint_of(paths, release), uses_gpu(paths, release))


def plan_for(subject: BenchSubject, *, quick: bool = False, everything: bool = False) -> BenchPlan:
    config = jsons.loads((subject.checkpoint / "config.json").read_text(encoding="utf-8"))
    config_tokens = int((config.get("text_config") or config).get("max_position_embeddings", 0))
    limits = Limits.of(subject.release.argv, config_tokens)
    wanted = BenchParts(ALL_PARTS, quick=quick, everything=everything, whole=subject.release.demands.scripted)
    cells = cells_of(limits, wanted)
    if not cells:
        cause = f"{subject.release.tag} takes {limits.tokens} tokens: too few for any cell of the plan"
        raise InputError(cause, next_step="raise --max-model-len in its recipe, and build it again")
    return BenchPlan(cells, limits.tokens)


def common(plans: Sequence[BenchPlan]) -> BenchPlan:
    """What both can be asked alike, and of the sweep the longest of the short prompts, of one request at a time and
    of as many as both allow."""
    both = [cell for cell in plans[0].cells if cell in plans[1].cells]
    short = [cell for cell in both if cell.kind == "sweep" and cell.input_tokens <= LONGEST_COMPARED]
    if not both:  # a scripted model is kept from ending its answers, another is not
        raise InputError("no prompt fits both releases", next_step="compare releases with longer contexts")
    length = max((cell.input_tokens for cell in short), default=0)
    ends = [cell for cell in short if cell.input_tokens == length]
    prompts = [cell for cell in both if cell.kind == "prompt"]
    return BenchPlan((*prompts, *dict.fromkeys([*ends[:1], *ends[-1:]])), min(one.context for one in plans))
