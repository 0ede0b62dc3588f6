"""What was found out about a release: smoke test, quality, speed. A record that is not there is "not measured"."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from sparkpin.core import terminal
from sparkpin.core.errors import SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.history.report.facts import (
    NOT_MEASURED,
    Kind,
    LimitBar,
    ReportEvidence,
    ReportRow,
)
from sparkpin.measure.quality.report import cells
from sparkpin.releases import quality_allowance, quality_gate
from sparkpin.releases import quality_record as quality
from sparkpin.releases.record import Release

NOT_APPLICABLE = "does not apply: "
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
    rows = [check_row(check) for check in checks if isinstance(check, dict)] if isinstance(checks, list) else []
    kinds = [row.kind for row in rows]
    counted = f", {kinds.count('good')} of {len(kinds) - kinds.count('none')} checks" if kinds else ""
    rows = joined(rows)
    if mods := smoke.get("mods"):
        rows.append(ReportRow("mods at work", ", ".join(map(str, mods)), "good"))
    if release.smoke_why:
        rows.append(ReportRow("no server ran", release.smoke_why, "unclear"))
    return ReportEvidence("Smoke", kind, f"{release.smoke_text}{counted}", tuple(rows))


def joined(rows: Sequence[ReportRow]) -> list[ReportRow]:
    """Checks that do not apply for the same reason in one row, each where the first of them stands."""
    found: dict[object, ReportRow] = {}
    for at, row in enumerate(rows):
        key = row.text if row.kind == "none" else at
        found[key] = dataclasses.replace(row, name=f"{found[key].name}, {row.name}") if key in found else row
    return list(found.values())


def check_row(check: dict[str, object]) -> ReportRow:
    name, detail = str(check.get("name")), str(check.get("detail", ""))
    if check.get("applicable") is False:
        return ReportRow(name, f"{NOT_APPLICABLE}{detail}", "none")
    return ReportRow(name, detail, "good" if check.get("passed") is True else "bad")


def quality_of(paths: Paths, release: Release) -> ReportEvidence:
    """Against the parent stage, else the newest comparison with any other."""
    hint = f"invoke quality {release.tag}{'' if release.demands.parent else ' --against TAG'}"
    try:
        chosen = quality.against_parent(paths, release) or next(reversed(quality.records_of(paths, release)), None)
        if chosen and chosen.role == "parent":  # against the limits that the stage sets now, as `promote` does
            chosen = dataclasses.replace(chosen, judged=quality_gate.judged(paths, release, chosen) or chosen.judged)
        reason = quality_gate.accepted_reason(paths, release, chosen, chosen.more) if chosen else ""
    except SparkpinError as error:
        return ReportEvidence("Quality", "bad", "record damaged", (ReportRow("record", error.message, "bad"),), hint)
    if chosen is None:
        return ReportEvidence("Quality", "none", NOT_MEASURED, hint=hint)
    overall = chosen.overall
    rows = [
        ReportRow("KL, nats a token", overall.kl.text()),
        ReportRow("same likeliest token", overall.top1.text(".4f")),
        ReportRow(
            "perplexity",
            f"{terminal.figure(overall.perplexity_reference, 4)} -> {terminal.figure(overall.perplexity, 4)}",
        ),
        *(
            ReportRow(one.name, f"{one.release} of {one.asked} right, reference {one.reference}")
            for one in chosen.skills
        ),
        *(ReportRow("note", note) for note in chosen.notes),
    ]
    kind, word = quality_word(chosen)
    if reason:
        word += f"; accepted: {reason}"
    quick = ", a quick look" if chosen.quick else ""
    return ReportEvidence(
        "Quality",
        kind,
        f"{word}{quick} ({chosen.reference.rpartition(':')[2]})",
        tuple(rows),
        limits=tuple(limit_bar(one, chosen) for one in chosen.judged),
    )


def bracketed(interval: str) -> str:
    return f"[{interval.replace(' .. ', ', ')}]"


def limit_bar(judged: quality.Judged, record: quality.QualityRecord) -> LimitBar:
    seen, limit, name = judged.seen, judged.limit, judged.name
    value, interval, allowed, verdict = cells(seen, name, {name: judged})
    room, least = quality_allowance.room_of(name, limit), name in quality_allowance.AT_LEAST

    def share(figure: float) -> float:
        loss = 1 - figure if least else figure - 1 if name == "perplexity" else figure
        return loss / room if room else math.copysign(math.inf, loss) if loss else 0.0

    if judged.kept == "unclear":
        verdict += f": {quality_allowance.would_tell(judged, record.overall.texts, record.skills)}"
    return LimitBar(
        name=NAMES.get(name, name),
        seen=f"{value} {bracketed(interval)}",
        limit=allowed,
        verdict=verdict,
        kind=KEPT[judged.kept],
        value=share(seen.value),
        low=share(seen.high if least else seen.low),
        high=share(seen.low if least else seen.high),
    )


def quality_word(found: quality.QualityRecord) -> tuple[Kind, str]:
    if found.more:
        return "bad", f"lost more than allowed: {', '.join(one.name for one in found.more)}"
    if unclear := [one.name for one in found.judged if one.kept == "unclear"]:
        return "unclear", f"cannot tell: {', '.join(unclear)}"
    return ("good", "within its allowance") if found.judged else ("unclear", "compared, no allowance declared")
