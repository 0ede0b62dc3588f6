"""What was found out about a release: smoke test, quality, speed. A record that is not there is "not measured"."""

from __future__ import annotations

import dataclasses
import math
from statistics import median
from typing import TypeGuard

from sparkpin.core import terminal
from sparkpin.core.errors import SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.measure.bench import record as bench
from sparkpin.measure.bench.plan import QUICK_OUTPUT
from sparkpin.releases import quality_allowance, quality_gate
from sparkpin.releases import quality_record as quality
from sparkpin.releases.record import Release
from sparkpin.report.facts import NOT_MEASURED, Kind, LimitBar, ReportEvidence, ReportRow, Speed

MOST = 1e6  # tokens a second, and seconds
KEPT: dict[str, Kind] = {"within": "good", "unclear": "unclear", "more": "bad"}
NAMES = {
    "kl": "KL, nats a token",
    "top1": "same first choice",
    "perplexity": "perplexity, ratio",
    "continued_kl": "KL while decoding, nats a token",
    "tool_calls": "tool calls lost",
    "needles": "needles lost",
}


def smoke_of(release: Release) -> ReportEvidence:
    smoke = release.smoke
    if smoke is None:
        return ReportEvidence("Smoke", "none", NOT_MEASURED, hint=f"invoke smoke {release.tag}")
    kind: Kind = "good" if release.smoke_passed else "unclear" if release.smoke_inspected else "bad"
    checks = smoke.get("checks")
    checks = [check for check in checks if isinstance(check, dict)] if isinstance(checks, list) else []
    rows = [check_row(check) for check in checks if check.get("applicable") is not False]
    counted = f", {sum(row.kind == 'good' for row in rows)} of {len(rows)} checks" if rows else ""
    skipped = [str(check.get("name")) for check in checks if check.get("applicable") is False]
    rows += [ReportRow("did not apply", ", ".join(skipped))] if skipped else []
    return ReportEvidence("Smoke", kind, f"{release.smoke_text}{counted}", tuple(rows))


def check_row(check: dict[str, object]) -> ReportRow:
    passed = check.get("passed") is True
    return ReportRow(str(check.get("name")), str(check.get("detail", "")), "good" if passed else "bad")


def quality_of(paths: Paths, release: Release) -> ReportEvidence:
    """Against the parent stage, else the newest comparison with any other."""
    hint = f"invoke quality {release.tag}{'' if release.demands.parent else ' --against TAG'}"
    try:
        found = quality.against_parent(paths, release) or next(reversed(quality.records_of(paths, release)), None)
        if found and found.role == "parent":  # against the limits that the stage sets now, as `promote` does
            found = dataclasses.replace(found, judged=quality_gate.judged(paths, release, found) or found.judged)
        reason = quality_gate.accepted_reason(paths, release, found, found.more) if found else ""
    except SparkpinError as error:
        return damaged("Quality", error, hint)
    if found is None:
        return ReportEvidence("Quality", "none", NOT_MEASURED, hint=hint)
    rows = (
        ReportRow("KL, nats a token", found.overall.kl.text()),
        ReportRow("same likeliest token", found.overall.top1.text(".4f")),
        *(
            ReportRow(one.name, f"{one.release} of {one.asked} right, reference {one.reference}")
            for one in found.skills
        ),
        *(ReportRow("note", note) for note in found.notes),
    )
    kind, word = quality_word(found)
    word += f"; accepted: {reason}" * bool(reason) + ", a quick look" * found.quick
    limits = tuple(limit_bar(one) for one in found.judged)
    return ReportEvidence("Quality", kind, f"{word} ({found.reference.rpartition(':')[2]})", rows, limits=limits)


def damaged(title: str, error: SparkpinError, hint: str) -> ReportEvidence:
    return ReportEvidence(title, "bad", "record damaged", (ReportRow("record", error.message, "bad"),), hint)


def limit_bar(judged: quality.Judged) -> LimitBar:
    value, limit, name = judged.seen, judged.limit, judged.name
    room, least = quality_allowance.room_of(name, limit), name in quality_allowance.AT_LEAST

    def share(figure: float) -> float:
        loss = 1 - figure if least else figure - 1 if name == "perplexity" else figure
        return loss / room if room else math.copysign(math.inf, loss) if loss else 0.0

    return LimitBar(
        name=NAMES.get(name, name),
        measured=value.text(),
        limit=f"{'at least' if least else 'at most'} {limit:g}",
        verdict=quality_allowance.TOLD[judged.kept],
        kind=KEPT[judged.kept],
        value=share(value.value),
        low=share(value.high if least else value.low),
        high=share(value.low if least else value.high),
    )


def quality_word(found: quality.QualityRecord) -> tuple[Kind, str]:
    if found.more:
        return "bad", f"lost more than allowed: {', '.join(one.name for one in found.more)}"
    if unclear := [one.name for one in found.judged if one.kept == "unclear"]:
        return "unclear", f"cannot tell: {', '.join(unclear)}"
    return ("good", "within its allowance") if found.judged else ("unclear", "compared, no allowance declared")


def speed_of(paths: Paths, release: Release) -> Speed:
    """Of the newest finished benchmark, a quick one only where no other is."""
    hint = f"invoke bench {release.tag}"
    try:
        found = bench.newest(paths, release)
        if found and is_quick(found):
            found = next((one for one in reversed(bench.history(paths, release)) if not is_quick(one)), found)
    except SparkpinError as error:
        return Speed(damaged("Speed", error, hint))
    if found is None:
        return smoke_speed(release) or Speed(ReportEvidence("Speed", "none", NOT_MEASURED, hint=hint))
    rate, quick = found.decode_rate, is_quick(found)
    text = (f"{terminal.figure(rate)} tok/s" if rate else "measured") + " (quick)" * quick
    failed = sum(row.failed for row in found.benchmarks)
    first = [row.ttft / 1e3 for row in found.of_kind("prompt") if row.ttft]
    evidence = ReportEvidence(
        "Speed",
        "bad" if failed else "good",
        f"{text}, {terminal.count(failed, 'request')} failed" if failed else text,
        tuple(speed_row(row) for row in found.benchmarks),
        where=f"vLLM {found.conditions.vllm}; {found.conditions.host.line}",
    )
    machine = found.conditions.host.line
    if quick:  # its answers are too short for a figure that is set against others
        return Speed(evidence, machine=machine)
    return Speed(evidence, rate, median(first) if first else None, found.ceiling, machine)


def smoke_speed(release: Release) -> Speed | None:
    """Of the smoke test's own requests: better than nothing until there is a benchmark."""
    speed = (release.smoke or {}).get("speed")
    rate, first = (speed.get(name) if isinstance(speed, dict) else None for name in ("tokens_a_second", "first_token"))
    if not (is_figure(rate) and is_figure(first)):
        return None
    text = f"{terminal.figure(rate)} tok/s in its smoke test"
    evidence = ReportEvidence("Speed", "none", text, hint=f"invoke bench {release.tag}")
    return Speed(evidence, rate, first, machine=release.host.line if release.host else "", of_smoke=True)


def is_figure(value: object) -> TypeGuard[float]:
    """Somebody's bundle may hold anything."""
    return isinstance(value, int | float) and 0 < value < MOST


def is_quick(found: bench.BenchRecord) -> bool:
    """Whether a run was only to see that it works."""
    return all(row.response_size <= QUICK_OUTPUT for row in found.benchmarks)


def speed_row(row: bench.CellResult) -> ReportRow:
    name = row.name
    if row.kind == "sweep":
        name = f"{row.prompt_size:,} tokens, {terminal.count(row.concurrency, 'request')} at once"
    rates = {"output": row.output_rate, "decode": row.decode_rate, "prefill": row.pp_throughput.median}
    parts = [f"{what} {terminal.figure(rate)} tok/s" for what, rate in rates.items() if rate]
    parts += [f"first token {duration(row.ttft / 1e3)}"]
    parts += [f"{row.acceptance:.0%} of drafts accepted"] if row.acceptance is not None else []
    parts += [f"{row.failed} failed"] if row.failed else []
    return ReportRow(name, ", ".join(parts), "bad" if row.failed else "none")


def duration(value: float) -> str:
    return f"{terminal.figure(value)} s" if value >= 1 else f"{terminal.figure(1000 * value)} ms"
