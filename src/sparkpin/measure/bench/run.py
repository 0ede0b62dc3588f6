"""One release measured: cell by cell, each kept as soon as it is done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from sparkpin.core.errors import SmokeError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import Say
from sparkpin.host.engine import Engine
from sparkpin.host.fingerprint import Fingerprint, read_fingerprint
from sparkpin.measure.bench import record
from sparkpin.measure.bench.ceiling import with_ceiling
from sparkpin.measure.bench.load import TOOL, Begun, Done, Hello, run_steps
from sparkpin.measure.bench.measure import failures_of, measured, output_rate
from sparkpin.measure.bench.plan import BenchPlan, seconds_of, steps_of
from sparkpin.measure.bench.record import BenchRecord, Cell, CellResult, Conditions
from sparkpin.measure.bench.target import BenchSubject, BenchTarget, alone, memory_of, server_of, slowed
from sparkpin.pins.vllm_command import drop_flags
from sparkpin.releases.record import Release, now

SLOW = 20.0  # seconds from which on a step is announced


@dataclass(frozen=True)
class BenchPlace:
    """Where and on what a run happens. bandwidth: bytes a second of the memory, None where nobody stated it."""

    paths: Paths
    engine: Engine
    host: Fingerprint
    bandwidth: float | None
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
    differs = [
        what
        for what, same in (
            ("the image", there.image == release.image),
            ("the command", there.argv == conditions_argv(release)),
            ("the machine", there.host == place.host),
            ("the plan", known.planned == len(cells) and {row.cell for row in known.cells} <= set(cells)),
        )
        if not same
    ]
    if differs:
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
    count = 0
    events = run_steps(
        place.paths,
        place.engine,
        server.container,
        subject.release,
        subject.checkpoint,
        steps,
        plan,
        key=server.key,
        gpus=subject.gpus,
    )
    say(f"loading {TOOL} of the image")
    for event in events:
        match event:
            case Hello(vllm):
                conditions = conditions_of(place, server, vllm)
            case Begun(number):
                step = steps[number]
                if (seconds := seconds_of(step, plan.pace)) > SLOW:
                    say(f"{step.cell.name}{'' if step.counts else ', which does not count'}: about {seconds:.0f} s")
            case Done(number, result, before, after):
                step = steps[number]
                row = measured(step.cell, result, before, after, first.get(step.cell.name))
                require_answers(subject.release, row, failures_of(result))
                if not step.counts:
                    if step.cell.kind == "prompt":
                        first[step.cell.name] = output_rate(result)
                    continue
                count += 1
                say(f"{count} of {len(plan.cells)}: {row_line(row)}")
                assert conditions is not None  # the tool says hello first
                yield conditions, row


def require_answers(release: Release, row: CellResult, failures: Sequence[str]) -> None:
    if not row.completed:
        why = failures[0] if failures else "no reason given"
        raise SmokeError(
            f"{release.tag}: {row.cell.name}: none of {row.failed} requests was answered: {why}",
            next_step=f"invoke smoke {release.tag}",
        )


def row_line(row: CellResult) -> str:
    failed = f", {row.failed} FAILED" if row.failed else ""
    return f"{row.cell.name}: {row.output_tokens} tokens in {row.seconds:.1f} s, {row.output_rate:.1f} tok/s{failed}"


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
