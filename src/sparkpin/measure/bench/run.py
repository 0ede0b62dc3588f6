"""One release measured, cell by cell."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from sparkpin.core.errors import SmokeError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say
from sparkpin.host.engine import Engine
from sparkpin.host.fingerprint import Fingerprint, read_fingerprint
from sparkpin.measure.bench import record
from sparkpin.measure.bench.load import TOOL, run_steps
from sparkpin.measure.bench.measure import failures_of, measured
from sparkpin.measure.bench.plan import BenchPlan, steps_of
from sparkpin.measure.bench.record import BenchRecord, Ceiling, CellResult, Conditions, PeakMemory
from sparkpin.measure.bench.target import BenchSubject, BenchTarget, memory_of, server_of, slowed
from sparkpin.memory.decode import DecodeModel
from sparkpin.memory.inputs import read_inputs
from sparkpin.pins import manifests
from sparkpin.pins.vllm_flags import drop_flags
from sparkpin.releases.kept_inputs import project_of
from sparkpin.releases.record import Release, now
from sparkpin.smoke.server import alone


@dataclass(frozen=True)
class BenchPlace:
    """Where and on what a run happens."""

    paths: Paths
    engine: Engine
    host: Fingerprint
    bandwidth: float | None  # bytes a second of the memory, None where nobody stated it

    @classmethod
    def here(cls, paths: Paths, engine: Engine, bandwidth: float | None) -> BenchPlace:
        return cls(paths, engine, read_fingerprint(engine.version), bandwidth)


def bench(place: BenchPlace, subject: BenchSubject, plan: BenchPlan) -> BenchRecord:
    """Measure the cells of a plan and keep the record.

    Raises:
        SmokeError: a server or the load generator ended.
    """
    done: list[tuple[Conditions, CellResult]] = []  # of one at least: a plan has a cell
    peak: PeakMemory | None = None
    held: tuple[str, ...] = ()
    with (
        alone(place.paths, place.engine),
        server_of(place.paths, place.engine, subject) as server,
    ):
        for one in turn(place, server, plan):
            done.append(one)
            peak, held = memory_of(server, peak), slowed(subject, held)
    made = BenchRecord(
        time=now(),
        conditions=done[0][0],
        cells=tuple(row for _, row in done),
        start=server.start,
        memory=peak,
        slowed=held,
    )
    if place.bandwidth:
        made = with_ceiling(place, subject.release, made, place.bandwidth)
    say(f"kept: {record.keep(place.paths, subject.release, made)}")
    return made


def turn(place: BenchPlace, server: BenchTarget, plan: BenchPlan) -> Iterator[tuple[Conditions, CellResult]]:
    """The cells in the order in which they are done."""
    steps = steps_of(plan.cells)
    release = server.subject.release
    conditions: Conditions | None = None
    count = 0
    say(f"loading {TOOL} of the image")
    for event in run_steps(place.paths, place.engine, server, steps, plan):
        match event:
            case {"vllm": vllm}:
                conditions = conditions_of(place, server, vllm)
            case {"begin": number} if steps[number].counts:
                say(f"measuring {steps[number].cell.name}")
            case {"step": number, "result": result, "before": before, "after": after}:
                row = measured(steps[number].cell, result, before, after)
                require_answers(release, row, failures_of(result))
                if not steps[number].counts:
                    continue
                count += 1
                failed = f", {row.failed} FAILED" if row.failed else ""
                speed = f"{row.output_tokens} tokens in {row.seconds:.1f} s, {row.output_rate:.1f} tok/s{failed}"
                say(f"{count} of {len(plan.cells)}: {row.cell.name}: {speed}")
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
        argv=tuple(drop_flags(release.argv, "--api-key")),  # a key is nobody's business who reads a report
        env={name: value for name, value in release.env.items() if name != "VLLM_API_KEY"},
        server=server.how,
    )


def with_ceiling(place: BenchPlace, release: Release, record: BenchRecord, bandwidth: float) -> BenchRecord:
    """bandwidth: bytes a second. Without a ceiling, and the reason said, where it cannot be told or no prompt of the
    five was measured."""
    rows = [row for row in record.of_kind("prompt") if row.decode_rate]
    if record.decode_rate is None:
        say("no ceiling: it is one user's, of the five prompts, and none of them was measured")
        return record
    context = int(median((row.prompt_tokens + row.output_tokens / 2) / row.completed for row in rows))
    try:
        step = decode_of(place.paths, release).step(context)
    except SparkpinError as error:
        say(f"no ceiling: {error.message}")
        return record
    drafted, accepted = (sum(getattr(row, name) or 0 for row in rows) for name in ("drafted", "accepted"))
    share = accepted / drafted if drafted else 0.0
    rate = step.ceiling(bandwidth, share)
    return replace(
        record,
        ceiling=Ceiling(
            bandwidth=bandwidth,
            context=context,
            accepted=share,
            rate=rate,
            fraction=record.decode_rate / rate,
        ),
    )


def decode_of(paths: Paths, release: Release) -> DecodeModel:
    """Of the release as it was made, whatever the pins say by now."""
    with project_of(paths, release) as project:
        recipe = manifests.load_recipe(project, release.recipe)
        stack = manifests.load_stack(project, release.stack)
        chain = manifests.load_chain(project, release.stage)
        return read_inputs(replace(paths, project=project), recipe, stack, chain).decode
