"""Speed of a release as a report needs it, of its newest finished benchmark, a quick one only for want of another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from sparkpin.core import terminal
from sparkpin.core.errors import SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.history.report.facts import NOT_MEASURED, Reading, ReportEvidence, ReportRow, ReportTable, TableRow
from sparkpin.measure.bench import record as bench
from sparkpin.measure.bench.plan import QUICK_OUTPUT
from sparkpin.releases.record import Release


@dataclass(frozen=True)
class Speed:
    """Of a release; None and empty where that was not measured."""

    evidence: ReportEvidence
    tokens: float | None = None  # output tokens a second of one user, without the prefill
    first: float | None = None  # seconds to the first token
    prefill: float | None = None  # prompt tokens a second
    sweep: tuple[tuple[int, float], ...] = ()  # users at once, output tokens a second of all: the shortest prompts
    lengths: tuple[tuple[int, float], ...] = ()  # tokens of a prompt, seconds to the first token: one user
    ceiling: float | None = None  # tokens a second that one user could have at most
    machine: str = ""


def speed_of(paths: Paths, release: Release) -> Speed:
    hint = f"invoke bench {release.tag}"
    try:
        found = bench.newest(paths, release)
        if found and quick(found):
            found = next((one for one in reversed(bench.history(paths, release)) if not quick(one)), found)
        compared = bench.comparisons(paths, release)
    except SparkpinError as error:
        return Speed(
            ReportEvidence("Speed", "bad", "record damaged", (ReportRow("record", error.message, "bad"),), hint)
        )
    if found is None:
        rows = tuple(comparison_rows(compared))
        return Speed(ReportEvidence("Speed", "none", NOT_MEASURED, rows, hint))
    prompts = found.of_kind("prompt")
    first = [row.ttft.p50 for row in prompts if row.ttft]
    prefill = [row.prefill_rate for row in found.cells if row.prefill_rate]
    sweep = sweep_of(found)
    rate = found.decode_rate
    headline = f"{terminal.figure(rate)} tok/s, one user" if rate else "measured"
    if not rate and sweep:
        headline = f"{terminal.figure(sweep[-1][1])} tok/s, {terminal.count(sweep[-1][0], 'user')}"
    if quick(found):
        headline += " (quick)"
    failed = sum(row.failed for row in found.cells)
    evidence = ReportEvidence(
        "Speed",
        "bad" if failed else "good",
        f"{headline}, {terminal.count(failed, 'request')} failed" if failed else headline,
        (*rows_of(found), *comparison_rows(compared)),
        where=f"vLLM {found.conditions.vllm}; {found.conditions.host.line}",
        table=table_of(found),
    )
    machine = found.conditions.host.line
    if quick(found):
        return Speed(evidence, machine=machine)  # no chart: a point of it looks like the others
    return Speed(
        evidence=evidence,
        tokens=rate,
        first=median(first) if first else None,
        prefill=max(prefill, default=None),
        sweep=sweep,
        lengths=lengths_of(found),
        ceiling=found.ceiling.rate if found.ceiling else None,
        machine=machine,
    )


def quick(found: bench.BenchRecord) -> bool:
    """Whether a run was only to see that it works: its answers are too short for a speed."""
    return all(row.cell.output_tokens <= QUICK_OUTPUT for row in found.cells)


def sweep_of(found: bench.BenchRecord) -> tuple[tuple[int, float], ...]:
    cells = found.of_kind("sweep")
    shortest = min((row.cell.input_tokens for row in cells), default=0)
    chosen = {row.cell.concurrency: row.output_rate for row in cells if row.cell.input_tokens == shortest}
    return tuple(sorted(chosen.items()))


def lengths_of(found: bench.BenchRecord) -> tuple[tuple[int, float], ...]:
    alone = [row for row in found.of_kind("sweep") if row.cell.concurrency == 1 and row.ttft]
    return tuple(sorted((row.cell.input_tokens, row.ttft.p50) for row in alone if row.ttft))


def table_of(found: bench.BenchRecord) -> ReportTable:
    rows = [(row, readings(row)) for row in found.cells]
    seen = [place for place in range(len(COLUMNS)) if any(cells[place] for _, cells in rows)]
    return ReportTable(
        tuple(COLUMNS[place] for place in seen),
        tuple(
            TableRow(name_of(row.cell), tuple(cells[place] for place in seen), "bad" if row.failed else "none")
            for row, cells in rows
        ),
    )


def name_of(cell: bench.Cell) -> str:
    return (
        f"{cell.input_tokens:,} tokens, {terminal.count(cell.concurrency, 'user')}" if cell.input_tokens else cell.name
    )


def rows_of(found: bench.BenchRecord) -> Iterator[ReportRow]:
    """The start, the memory, the ceiling, and under which conditions all that holds."""
    if found.start:
        yield ReportRow("start", f"{found.start.seconds:.1f} s until it answered")
    if found.memory:
        seen = {"container": found.memory.container, "GPUs": found.memory.gpu}
        if told := [f"{name} {terminal.size(size)}" for name, size in seen.items() if size is not None]:
            yield ReportRow("memory, at most", ", ".join(told))
    if found.slowed:
        yield ReportRow("slowed down by", ", ".join(found.slowed), "unclear")
    if found.ceiling:
        share, rate, bandwidth = found.ceiling.fraction, found.ceiling.rate, found.ceiling.bandwidth / 1e9
        yield ReportRow("of the ceiling", f"{share:.1%} of {terminal.figure(rate)} tok/s at {bandwidth:g} GB/s")
    conditions = found.conditions
    yield ReportRow("measured", f"{found.time[:10]} on {conditions.host.line}")
    yield ReportRow("with", f"{conditions.tool}, vLLM {conditions.vllm}, server {conditions.server}")


COLUMNS = (
    ("Decode", "one user, after the first token"),
    ("Output", "of all users, prefill included"),
    ("First token", "median; 95 % within"),
    ("Next token", "median; 95 % within"),
    ("Prefill", "of the prompt"),
    ("Drafts accepted", "of the drafted tokens"),
    ("Failed", "requests"),
)


def readings(row: bench.CellResult) -> tuple[Reading | None, ...]:
    """One for each of COLUMNS."""
    share = row.acceptance
    return (
        rate_of(row.decode_rate),
        rate_of(row.output_rate),
        spread_of(row.ttft),
        spread_of(row.token),
        rate_of(row.prefill_rate),
        Reading(share, f"{share:.0%}") if share is not None else None,
        Reading(row.failed, str(row.failed)) if row.failed else None,
    )


def rate_of(value: float | None) -> Reading | None:
    return Reading(value, f"{terminal.figure(value)} tok/s") if value else None


def spread_of(found: bench.Spread | None) -> Reading | None:
    return Reading(found.p50, seconds(found.p50), seconds(found.p95)) if found else None


def seconds(value: float) -> str:
    return f"{terminal.figure(value)} s" if value >= 1 else f"{terminal.figure(1000 * value)} ms"


def comparison_rows(compared: tuple[bench.Comparison, ...]) -> Iterator[ReportRow]:
    """Ratios of the newest alone."""
    for one in compared[-1:]:
        names = [side.release.rpartition(":")[2] for side in (one.a, one.b)]
        for ratio in one.ratios:
            ends = [terminal.figure(end) for end in (ratio.low, ratio.high) if end is not None]
            between = f" [{', '.join(ends)}]" if ends else ""
            yield ReportRow(
                f"{names[1]} by {names[0]}", f"{ratio.cell}, {ratio.metric}: {terminal.figure(ratio.ratio)}{between}"
            )
