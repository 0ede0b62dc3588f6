"""The task `bench`: find release and plan, measure, print, keep."""

from __future__ import annotations

import json as jsons
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from sparkpin.build.consistent import require_consistent
from sparkpin.build.make import checkpoint_of
from sparkpin.cli.choose import choose_known, require_recipe
from sparkpin.cli.options import Json, KnownRecipe
from sparkpin.cli.tasks import task
from sparkpin.core import terminal
from sparkpin.core.errors import InputError
from sparkpin.core.paths import Paths
from sparkpin.host import machine
from sparkpin.host.engine import Engine, engine_of
from sparkpin.measure.bench import compare as comparing
from sparkpin.measure.bench import plan, record, text
from sparkpin.measure.bench import run as running
from sparkpin.measure.bench.plan import BenchParts, BenchPlan, Limits, cells_of
from sparkpin.measure.bench.record import BenchRecord, Comparison
from sparkpin.measure.bench.target import BenchSubject
from sparkpin.releases import container
from sparkpin.releases.current import require_current
from sparkpin.releases.record import Release, Releases
from sparkpin.releases.runs_here import obstacle, uses_gpu
from sparkpin.serve.memory.estimates import SPARK_BANDWIDTH
from sparkpin.serve.memory.recipe import parse_bandwidth
from sparkpin.serve.served import running_release

LONGEST_COMPARED = 1024
ROUNDS = 4


@dataclass(frozen=True)
class BenchOptions:
    quick: bool
    full: bool
    only: Literal["", "prompts", "sweep"]  # "" for both
    bandwidth: str  # GB/s as the person wrote it, "" for none
    dry_run: bool
    as_json: bool

    def __post_init__(self) -> None:
        if self.dry_run and self.as_json:
            raise InputError("--dry-run --json: a plan is printed for people only", next_step="leave out --json")

    @property
    def parts(self) -> frozenset[str]:
        return frozenset({"prompt", "sweep"} if not self.only else {self.only.removesuffix("s")})

    @property
    def bytes_a_second(self) -> float | None:
        """Of the memory; None where nobody stated it, and this is no machine of which it is known."""
        if self.bandwidth:
            return parse_bandwidth(self.bandwidth)
        return SPARK_BANDWIDTH if machine.read_host().is_spark else None


@task("measure")
def bench(
    tag: Annotated[
        str | None, "release to measure (default: what is served of the recipe, else its current release)"
    ] = None,
    *,
    recipe: KnownRecipe = None,
    compare: Annotated[str, "measure TAG_A and TAG in turns", "TAG_A"] = "",
    rounds: Annotated[int | None, "of a comparison, a turn of each (default: 4)", "COUNT"] = None,
    only: Annotated[
        Literal["", "prompts", "sweep"],
        "the five prompts, or concurrent requests and longer prompts (default: both)",
    ] = "",
    quick: Annotated[bool, "short answers and few cells: whether it works at all"] = False,
    full: Annotated[bool, "the cells with many long prompts at a time, too"] = False,
    bandwidth: Annotated[
        str, "of the memory in GB/s, for the ceiling (default: a DGX Spark's 273 on one, else no ceiling)"
    ] = "",
    dry_run: Annotated[bool, "print the plan and measure nothing"] = False,
    json: Json = False,
) -> None:
    """Measure how fast a release is, or two in turns.

    invoke bench --quick
    invoke bench --compare v2 v2-tq
    """
    asked = BenchOptions(quick=quick, full=full, only=only, bandwidth=bandwidth, dry_run=dry_run, as_json=json)
    turns = check_turns(compare, tag, rounds)
    paths = Paths.from_env()
    speed = None if compare else asked.bytes_a_second
    engine = engine_of(paths)
    releases = [*([Releases(paths).get(compare)] if compare else []), chosen(paths, engine, recipe, tag)]
    for release in releases:
        require_measurable(paths, engine, release)
    plans = [plan_for(paths, release, asked) for release in releases]
    wanted = common(plans) if compare else plans[0]
    if not json:
        text.show_plan(releases, wanted, turns=max(1, 2 * turns))
        if len({one.tag for one in releases}) < len(releases):
            terminal.show("note: both are one release; what differs is this machine's noise")
    if dry_run:
        terminal.show("Dry run: nothing was started.")
        return
    place = running.BenchPlace.here(paths, engine, speed)
    subjects = [subject_of(paths, release) for release in releases]
    if compare:
        show(comparing.compare(place, (subjects[0], subjects[1]), wanted, turns), as_json=json)
    else:
        show(running.bench(place, subjects[0], wanted), as_json=json)


def check_turns(compare: str, tag: str | None, rounds: int | None) -> int:
    """Of a comparison, a turn of each; 0 for none. InputError for options that do not go together."""
    if rounds is not None and not compare:
        step = f"invoke bench --compare A {tag or 'B'} --rounds {rounds}, of two releases that `invoke images` lists"
        raise InputError("--rounds is about --compare", next_step=step)
    if compare and not tag:
        raise InputError(f"--compare {compare}: with which release?", next_step=f"invoke bench --compare {compare} TAG")
    if rounds == 0:
        step = f"invoke bench --compare {compare} {tag} --rounds {ROUNDS}"
        raise InputError("--rounds: got 0, expected 1 or more", next_step=step)
    return (rounds or ROUNDS) if compare else 0


def show(made: BenchRecord | Comparison, *, as_json: bool) -> None:
    if as_json:
        terminal.show_json(record.to_json(made))
    elif isinstance(made, Comparison):
        text.show_comparison(made)
    else:
        text.show_record(made)


def chosen(paths: Paths, engine: Engine, recipe: str | None, tag: str | None) -> Release:
    records = Releases(paths)
    if tag:
        return records.get(tag, recipe)
    name = choose_known(paths, recipe)
    require_recipe(paths, records, name)
    if served := running_release(paths, engine, name):
        return records.get(served)
    return require_current(records, name)


def require_measurable(paths: Paths, engine: Engine, release: Release) -> None:
    require_consistent(paths, release)
    container.require_here(engine)
    if why := obstacle(paths, engine, release):
        raise InputError(f"{release.tag} cannot be measured here: {why}", next_step="measure it where it can be served")
    if not release.smoke_passed:
        terminal.say(
            f"warning: {release.tag} is {release.state}: no smoke test stands behind its answers, however fast"
        )


def subject_of(paths: Paths, release: Release) -> BenchSubject:
    return BenchSubject(release, checkpoint_of(paths, release), uses_gpu(paths, release))


def plan_for(paths: Paths, release: Release, asked: BenchOptions) -> BenchPlan:
    limits = Limits.of(release.argv, config_tokens(Releases(paths).checkpoint(release)))
    wanted = BenchParts(asked.parts, quick=asked.quick, everything=asked.full, whole=release.demands.scripted)
    cells = cells_of(limits, wanted)
    if not cells:
        raise InputError(
            f"{release.tag} takes {limits.tokens} tokens: too few for any cell of the plan",
            next_step="raise --max-model-len in its recipe, and build it again",
        )
    return BenchPlan(cells, limits.tokens)


def config_tokens(checkpoint: Path) -> int:
    """What the model's configuration allows, of prompt and answer together. Of a checkpoint that is not made yet
    nobody knows: then as if it allowed all lengths."""
    try:
        config = jsons.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return plan.LENGTHS[-1] + plan.SWEEP_OUTPUT
    return int((config.get("text_config") or config).get("max_position_embeddings", 0))


def common(plans: Sequence[BenchPlan]) -> BenchPlan:
    """What both can be asked alike, and of the sweep the longest of the short prompts, of one request at a time and
    of as many as both allow."""
    both = [cell for cell in plans[0].cells if cell in plans[1].cells]
    short = [cell for cell in both if cell.kind == "sweep" and cell.input_tokens <= LONGEST_COMPARED]
    if not both:  # a scripted model is kept from ending its answers, another is not
        raise InputError("no prompt fits both releases", next_step="the same command with --only sweep")
    length = max((cell.input_tokens for cell in short), default=0)
    ends = [cell for cell in short if cell.input_tokens == length]
    return BenchPlan(
        cells=(*(c for c in both if c.kind == "prompt"), *dict.fromkeys([*ends[:1], *ends[-1:]])),
        context=min(one.context for one in plans),
    )
