"""What a person reads of a run, of a plan and of a comparison. Pure, but for the tables, which are printed."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from sparkpin.core import terminal
from sparkpin.measure.bench.plan import BenchPlan
from sparkpin.measure.bench.record import BenchRecord, Cell, CellResult, Comparison, Conditions, Ratio, Spread
from sparkpin.releases.record import Release
from sparkpin.smoke.startup import STAGES

COLUMNS = ("measured", "tokens", "tok/s", "decode", "TTFT, ms", "token, ms", "per part", "accepted")
SWEEP_COLUMNS = (*COLUMNS[:-1], "prefill")
PLAN_COLUMNS = ("cell", "prompt", "answer", "at a time", "requests")
RATIO_COLUMNS = ("measured", "what", "A", "B", "B / A", "95 %")
LEGEND = (
    "tok/s: of all answers, prefill included; decode: one user's, after the first token; ms: the median and the 95th "
    "percentile, to the first token and from token to token"
)
COUNTING = (
    "tokens: as the server counts them (usage). With speculative decoding a part of a stream carries several: a tool "
    "that counts parts or steps is low by `per part`"
)
METRICS = {
    "output_rate": "tok/s",
    "decode_rate": "decode tok/s",
    "ttft": "TTFT, s",
    "token": "s a token",
}


def show_plan(releases: Sequence[Release], plan: BenchPlan, *, turns: int = 1) -> None:
    """turns: how often all of it is measured."""
    cells = plan.cells
    terminal.show(", ".join(release.tag for release in releases))
    terminal.table(PLAN_COLUMNS, [plan_row(cell) for cell in cells])
    terminal.show(f"{terminal.count(len(cells), 'cell')}{f', {turns} times' if turns > 1 else ''}")


def plan_row(cell: Cell) -> tuple[str, ...]:
    twice = "2, the second counts" if cell.kind == "prompt" else f"{cell.requests}, after 1 that does not count"
    most = "" if cell.whole else "at most "
    prompt = f"{cell.input_tokens:,} random" if cell.input_tokens else "text"
    return cell.name, prompt, f"{most}{cell.output_tokens:,}", str(cell.concurrency), twice


def show_record(record: BenchRecord) -> None:
    """Never without the machine."""
    for line in condition_lines(record.conditions, record.time):
        terminal.show(line)
    if prompts := record.of_kind("prompt"):
        terminal.table(COLUMNS, [(*row(one), accepted(one)) for one in prompts])
    if sweep := record.of_kind("sweep"):
        terminal.table(SWEEP_COLUMNS, [(*row(one), rate(one.prefill_rate)) for one in sweep])
    for line in record_lines(record):
        terminal.show(line)


def condition_lines(conditions: Conditions, time: str) -> list[str]:
    served = ", as it was being served" if conditions.server == "served" else ""
    return [
        f"{conditions.release}{served}, {time[:16].replace('T', ' ')} UTC",
        f"on: {conditions.host.line}",
        f"vLLM {conditions.vllm}, load by its own `{conditions.tool}`; settings: {' '.join(conditions.argv[2:])}",
    ]


def row(one: CellResult) -> tuple[str, ...]:
    most = one.completed * one.cell.output_tokens
    return (
        f"{one.cell.name}{f' ({one.failed} FAILED)' if one.failed else ''}",
        f"{one.output_tokens:,}{f' of {most:,}' if one.ended_early else ''}",
        rate(one.output_rate),
        rate(one.decode_rate),
        milliseconds(one.ttft),
        milliseconds(one.token),
        "-" if one.tokens_a_part is None else f"{one.tokens_a_part:.2f}",
    )


def accepted(one: CellResult) -> str:
    if one.acceptance is None:
        return "-"
    places = " ".join(f"{share:.0%}" for share in one.accepted_by_position)
    return f"{one.acceptance:.0%} ({places})"


def rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def milliseconds(value: Spread | None) -> str:
    return "-" if value is None else f"{number(1e3 * value.p50)} / {number(1e3 * value.p95)}"


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def record_lines(record: BenchRecord) -> list[str]:
    found = [LEGEND, COUNTING]
    if record.decode_rate is not None:
        found.append(f"one user, median of the prompts: {record.decode_rate:.1f} tok/s of decode")
    if ceiling := record.ceiling:
        found.append(
            f"ceiling at {ceiling.bandwidth / 1e9:g} GB/s, {ceiling.context:,} tokens in the cache, "
            f"{ceiling.accepted:.0%} of the drafts accepted: {ceiling.rate:.1f} tok/s; reached: {ceiling.fraction:.1%}"
        )
    if record.start:
        found.append(f"start: {start_line(record.start.began, record.start.seconds)}")
    if record.memory:
        found.append(f"memory, the most seen: {memory_line(record.memory.container, record.memory.gpu)}")
    if record.slowed:
        found.append(f"note: the GPU's clocks were held down meanwhile: {', '.join(record.slowed)}")
    if others := sum(max(one.others or 0, 0) for one in record.cells):
        found.append(f"note: the server made {others:,} more tokens meanwhile for others: these figures are too low")
    if record.conditions.server == "served":
        found.append("note: a service was measured; process 1 asks it for a token every 10 s")
    return found


def start_line(began: dict[str, float], seconds: float) -> str:
    """`29.9 s: start 12.0, weights 3.1, ...`: how long each phase took."""
    known = [stage for stage in STAGES if stage in began]
    ends = [*(began[stage] for stage in known[1:]), seconds]
    parts = [f"{stage} {end - began[stage]:.1f}" for stage, end in zip(known, ends, strict=True)]
    return f"{seconds:.1f} s: {', '.join(parts)}"


def memory_line(container: int | None, gpu: int | None) -> str:
    parts = [f"container {terminal.size(container)}"] if container is not None else []
    parts += [f"GPU {terminal.size(gpu)} (all programs)"] if gpu is not None else []
    return ", ".join(parts) or "nobody tells"


def show_comparison(made: Comparison) -> None:
    for letter, side in (("A", made.a), ("B", made.b)):
        terminal.show(f"{letter}: {side.release}, vLLM {side.vllm}; settings: {' '.join(side.argv[2:])}")
    terminal.show(f"on: {made.a.host.line}, {made.time[:16].replace('T', ' ')} UTC")
    terminal.table(RATIO_COLUMNS, [ratio_row(one) for one in made.ratios])
    how = (
        "each turn with a server of its own; the intervals cover differences from start to start"
        if made.restarted
        else "both servers up all the time, one of them idle; differences from start to start are not in the intervals"
    )
    terminal.show(f"order: {made.order}; {how}")
    terminal.show(made.interval)
    if made.failed:
        terminal.show(
            f"note: {terminal.count(made.failed, 'request')} FAILED: what ran beside them had the server to itself"
        )
    terminal.show(COUNTING.partition(".")[0])


def ratio_row(one: Ratio) -> tuple[str, ...]:
    low, high = one.low, one.high
    ends = "one round: none" if low is None or high is None else f"{low:.3f} to {high:.3f}"
    a, b = (terminal.figure(median(side)) for side in (one.a, one.b))
    return one.cell, METRICS[one.metric], a, b, f"{one.ratio:.3f}", ends
