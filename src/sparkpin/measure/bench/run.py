"""One release measured: cell by cell, each kept as soon as it is done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from sparkpin.core.errors import SmokeError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import Say
from sparkpin.host.engine import Engine
from sparkpin.host.fingerprint import Fingerprint, read_fingerprint
from sparkpin.measure.bench import record
from sparkpin.measure.bench.load import TOOL, run_steps
from sparkpin.measure.bench.measure import failures_of, measured, output_rate
from sparkpin.measure.bench.plan import BenchPlan, duration, pace_seen, seconds_of, steps_of
from sparkpin.measure.bench.record import BenchRecord, Ceiling, Cell, CellResult, Conditions
from sparkpin.measure.bench.target import BenchSubject, BenchTarget, memory_of, server_of, slowed
from sparkpin.measure.roofline.reads import DecodeModel, model_of, roofline
from sparkpin.pins import manifests
from sparkpin.pins.vllm_command import drop_flags
from sparkpin.releases.kept_inputs import project_of
from sparkpin.releases.record import Release, now
from sparkpin.serve.memory import recipe as memory
from sparkpin.smoke.server import alone

SLOW = 20.0  # seconds from which on a step is announced


@dataclass(frozen=True)
class BenchPlace:
    """Where and on what a run happens."""

    paths: Paths
    engine: Engine
    host: Fingerprint
    bandwidth: float | None  # bytes a second of the memory, None where nobody stated it
    say: Say

    @classmethod
    def here(cls, paths: Paths, engine: Engine, bandwidth: float | None, say: Say) -> BenchPlace:
        return cls(paths, engine, read_fingerprint(engine.version), bandwidth, say)


def bench(place: BenchPlace, subject: BenchSubject, plan: BenchPlan, *, resume: bool) -> BenchRecord:
    """Measure the cells that are not measured yet and keep the record.

    Raises:
        SmokeError: a server or the load generator ended; finished cells are kept.
    """
    paths, release, cells = place.paths, subject.release, plan.cells
    with alone(paths, place.engine, place.say):
        known = kept_before(place, release, cells, resume=resume)
        done = {row.cell.name: row for row in known.cells} if known else {}
        left = replace(plan, cells=tuple(cell for cell in cells if cell.name not in done))
        with server_of(paths, place.engine, subject, place.say) as server:
            made = known and replace(known, sessions=known.sessions + 1)
            for conditions, row in turn(place, server, left):
                done[row.cell.name] = row
                made = BenchRecord(
                    time=made.time if made else now(),
                    conditions=conditions,
                    cells=tuple(done[cell.name] for cell in cells if cell.name in done),
                    planned=len(cells),
                    sessions=made.sessions if made else 1,
                    start=server.start,
                    memory=memory_of(server, made.memory if made else None),
                    slowed=slowed(subject, made.slowed if made else ()),
                )
                if made.finished and place.bandwidth:
                    made = with_ceiling(paths, release, made, place.bandwidth, place.say)
                path = record.keep(paths, release, made)
    assert made is not None  # a plan has at least one cell
    place.say(f"kept: {path}")
    return made


def kept_before(place: BenchPlace, release: Release, cells: Sequence[Cell], *, resume: bool) -> BenchRecord | None:
    """The run to go on with. One of another release, machine or plan is none, and is told."""
    known = record.unfinished(place.paths, release)
    if known is None or not resume:
        if known:
            place.say(f"not used: {len(known.cells)} of {known.planned} cells of a run that was broken off (--resume)")
        elif resume:
            place.say("nothing to resume: a new run")
        return None
    there = known.conditions
    same = {
        "the image": there.image == release.image,
        "the command": there.argv == conditions_argv(release),
        "the machine": there.host == place.host,
        "the plan": known.planned == len(cells) and {row.cell for row in known.cells} <= set(cells),
    }
    if differs := [what for what, is_same in same.items() if not is_same]:
        place.say(f"a new run: of the one that was broken off {' and '.join(differs)} differ from now")
        return None
    place.say(f"{len(known.cells)} of {known.planned} cells are there already")
    return known


def turn(place: BenchPlace, server: BenchTarget, plan: BenchPlan) -> Iterator[tuple[Conditions, CellResult]]:
    """The cells as they come, in the order in which they are done."""
    steps = steps_of(plan.cells)
    subject, say = server.subject, place.say
    first: dict[str, float] = {}
    conditions: Conditions | None = None
    count, pace = 0, plan.pace
    events = run_steps(place.paths, place.engine, server, steps, plan)
    say(f"loading {TOOL} of the image")
    for event in events:
        match event:
            case {"vllm": vllm}:
                conditions = conditions_of(place, server, vllm)
            case {"begin": number}:
                step = steps[number]
                if (seconds := seconds_of(step, pace)) > SLOW:
                    say(f"{step.cell.name}{'' if step.counts else ', which does not count'}: about {seconds:.0f} s")
            case {"step": number, "result": result, "before": before, "after": after}:
                step = steps[number]
                row = measured(step.cell, result, before, after, first.get(step.cell.name))
                require_answers(subject.release, row, failures_of(result))
                if pace.guessed and (pace := pace_seen(pace, row)) and not pace.guessed:
                    slower = max(1.0, row.seconds / seconds_of(step, pace))  # what no rate tells: a busy machine
                    left = slower * sum(seconds_of(one, pace) for one in steps[number + 1 :])
                    say(f"about {duration(left)} left, {pace.source}: {pace.decode:.0f} tok/s of decode")
                if not step.counts:
                    if step.cell.kind == "prompt":
                        first[step.cell.name] = output_rate(result)
                    continue
                count += 1
                failed = f", {row.failed} FAILED" if row.failed else ""
                told = f"{row.output_tokens} tokens in {row.seconds:.1f} s, {row.output_rate:.1f} tok/s{failed}"
                say(f"{count} of {len(plan.cells)}: {row.cell.name}: {told}")
                assert conditions is not None  # the tool says hello first
                yield conditions, row


def require_answers(release: Release, row: CellResult, failures: Sequence[str]) -> None:
    if not row.completed:
        why = failures[0] if failures else "no reason given"
        raise SmokeError(
            f"{release.tag}: {row.cell.name}: none of {row.failed} requests was answered: {why}",
            next_step=f"invoke smoke {release.tag}",
        )


def conditions_of(place: BenchPlace, server: BenchTarget, vllm: str) -> Conditions:
    release = server.subject.release
    return Conditions(
        release=release.tag,
        image=release.image,
        host=place.host,
        vllm=vllm,
        tool=TOOL,
        argv=conditions_argv(release),
        env={name: value for name, value in release.env.items() if name != "VLLM_API_KEY"},
        server=server.how,
    )


def conditions_argv(release: Release) -> tuple[str, ...]:
    """A key is nobody's business who reads a report."""
    return tuple(drop_flags(release.argv, "--api-key"))


def with_ceiling(paths: Paths, release: Release, record: BenchRecord, bandwidth: float, say: Say) -> BenchRecord:
    """bandwidth: bytes a second. Without a ceiling, and the reason said, where it cannot be told or no prompt of the
    five was measured."""
    rows = [row for row in record.of_kind("prompt") if row.decode_rate]
    if record.decode_rate is None:
        say("no ceiling: it is one user's, of the five prompts, and none of them was measured")
        return record
    try:
        model = model_made(paths, release)
    except SparkpinError as error:
        say(f"no ceiling: {error.message}")
        return record
    drafted, accepted = (sum(getattr(row, name) or 0 for row in rows) for name in ("drafted", "accepted"))
    context = int(median((row.prompt_tokens + row.output_tokens / 2) / row.completed for row in rows))
    share = accepted / drafted if drafted else 0.0
    made = roofline(model, context=context, bandwidth=bandwidth, accepted=share)
    return replace(
        record,
        ceiling=Ceiling(
            bandwidth=bandwidth,
            context=context,
            accepted=share,
            rate=made.ceiling,
            fraction=made.fraction(record.decode_rate),
        ),
    )


def model_made(paths: Paths, release: Release) -> DecodeModel:
    """Of the release as it was made, whatever the pins say by now."""
    with project_of(paths, release) as project:
        recipe = manifests.load_recipe(project, release.recipe)
        stack = manifests.load_stack(project, release.stack)
        chain = manifests.load_chain(project, release.stage)
        known = memory.known_of(replace(paths, project=project), recipe, stack, chain)
    return model_of(known.tensors, known.geometry, known.settings, known.loading, symmetric=known.symmetric)
