"""What is printed of a run and of a comparison."""

from __future__ import annotations

from statistics import median

from sparkpin.core import terminal
from sparkpin.measure.bench.record import BenchRecord, CellResult, Comparison, Ratio

COLUMNS = ("measured", "tokens", "tok/s", "decode", "prefill", "TTFT, ms", "per part", "accepted")
RATIO_COLUMNS = ("measured", "what", "A", "B", "B / A", "95 %")
LEGEND = (
    "tok/s: of all answers, prefill included; decode: of one request, after the first read of its stream. Prefill: of "
    "all at a time; TTFT: to the first token, the median and the most; per part: tokens in a part of a stream"
)
WATCH = 0.01  # of all tokens: process 1 asks a service for one every 10 s, which is no load
UNITS = {"output_rate": "tok/s", "decode_rate": "decode tok/s", "ttft": "TTFT, ms"}


def show_record(record: BenchRecord) -> None:
    """Never without the machine."""
    conditions = record.conditions
    served = ", as it was being served" if conditions.server == "served" else ""
    terminal.show(f"{conditions.release}{served}, {minute(record.timestamp)}\non: {conditions.host.line}")
    terminal.show(f"vLLM {conditions.vllm}; settings: {' '.join(conditions.argv[2:])}")
    terminal.table(COLUMNS, [row(one) for one in record.benchmarks])
    terminal.show("\n".join([LEGEND, *record_lines(record)]))


def minute(time: str) -> str:
    return f"{time[:16].replace('T', ' ')} UTC"


def row(one: CellResult) -> tuple[str, ...]:
    places = " ".join(f"{share:.0%}" for share in one.accepted_by_position)
    most = one.completed * one.response_size
    rates = (one.output_rate, one.decode_rate, one.pp_throughput.median)
    return (
        f"{one.name}{f' ({one.failed} FAILED)' if one.failed else ''}",
        f"{one.output_tokens:,}{f' of {most:,}' if one.output_tokens < most else ''}",
        *("-" if rate is None else f"{rate:.1f}" for rate in rates),
        " / ".join(terminal.figure(time) for time in (one.ttft, max(one.e2e_ttft.values))),
        f"{one.later_tokens / one.later_parts:.2f}" if one.later_parts else "-",
        "-" if one.acceptance is None else f"{one.acceptance:.0%} ({places})",
    )


def record_lines(record: BenchRecord) -> list[str]:
    found = []
    if rate := record.decode_rate:
        found.append(f"one request at a time, median of the prompts: {rate:.1f} tok/s of decode")
        if ceiling := record.ceiling:
            found.append(f"ceiling of the memory's bandwidth: {ceiling:.1f} tok/s; reached: {rate / ceiling:.1%}")
    if record.start_seconds is not None:
        found.append(f"start: {terminal.seconds(record.start_seconds)}")
    if record.memory:
        found.append(f"memory of the container: {terminal.size(record.memory)}")
    if record.slowed:
        found.append(f"note: the GPU's clocks were held down meanwhile: {', '.join(record.slowed)}")
    others = sum(max(one.others or 0, 0) for one in record.benchmarks)
    if others > WATCH * sum(one.output_tokens for one in record.benchmarks):
        found.append(f"note: the server made {others:,} more tokens meanwhile for others: these figures are too low")
    return found


def ratio_row(one: Ratio) -> tuple[str, ...]:
    ends = [terminal.figure(end, 4) for end in (one.low, one.high) if end is not None]
    medians = [terminal.figure(median(side)) for side in (one.a, one.b)]
    return one.cell, UNITS[one.metric], *medians, f"{one.ratio:.3f}", " to ".join(ends) or "one round: none"


def show_comparison(found: Comparison) -> None:
    for letter, side in (("A", found.a), ("B", found.b)):
        terminal.show(f"{letter}: {side.release}, vLLM {side.vllm}; settings: {' '.join(side.argv[2:])}")
    terminal.show(f"on: {found.a.host.line}, {minute(found.timestamp)}")
    terminal.table(RATIO_COLUMNS, list(map(ratio_row, found.ratios)))
    terminal.show(f"order: {found.order}; each turn had a server of its own")
    terminal.show("B / A: geometric mean of paired ratios, one a round; 95 %: an interval for it, of their logarithms")
    if found.failed:
        terminal.show(f"note: {terminal.count(found.failed, 'request')} FAILED: others had more of the server")
