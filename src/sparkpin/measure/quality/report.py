"""A record as a person reads it."""

from __future__ import annotations

from collections.abc import Iterator

from sparkpin.core import terminal
from sparkpin.core.terminal import show
from sparkpin.measure.quality.skills import NEEDLES
from sparkpin.releases import quality_allowance
from sparkpin.releases.quality_record import Figure, Judged, QualityRecord, Texts

WHAT = ("figure", "seen", "95 % interval", "allowed", "verdict")
KINDS = ("texts", "count", "tokens", "KL", "same first choice", "perplexity ratio", "KL decoding", "same words")
FAILURES = 8  # told of each skill
FORMS = {"top1": ".2%", "perplexity": ".4f", "tool_calls": ".1%", "needles": ".1%"}  # of the others ".2g"


def report(record: QualityRecord) -> None:
    show(f"{record.release} against {record.reference} ({record.role})")
    limits = {judged.name: judged for judged in record.judged}
    terminal.table(WHAT, list(rows(record, limits)))
    show()
    terminal.table(KINDS, [of_kind(texts) for texts in record.texts[1:]])
    for skill in record.skills:
        for failure in skill.failures[:FAILURES] if skill.name != NEEDLES else ():
            show(f"lost: {failure}")
    for note in record.notes:
        show(f"note: {note}")
    show(verdict(record))


def rows(record: QualityRecord, limits: dict[str, Judged]) -> Iterator[tuple[object, ...]]:
    texts = record.overall
    both = (terminal.figure(texts.perplexity_reference, 4), terminal.figure(texts.perplexity, 4))
    yield "KL, nats a token", *cells(texts.kl, "kl", limits)
    yield "same first choice", *cells(texts.top1, "top1", limits)
    yield f"perplexity, ratio ({' -> '.join(both)})", *cells(texts.ratio, "perplexity", limits)
    yield "KL while decoding, nats a token", *cells(texts.continued_kl, "continued_kl", limits)
    yield "same words while decoding", *seen(texts.continued_same, ".1%"), "", ""
    keys = {name: key for key, name in quality_allowance.SKILLS.items()}
    for skill in record.skills:
        right = f"{skill.reference} -> {skill.release} of {skill.asked} right"
        yield f"{skill.name}, lost ({right})", *cells(skill.lost, keys.get(skill.name, "needles"), limits, skill.name)


def cells(figure: Figure, key: str, limits: dict[str, Judged], name: str = "") -> tuple[str, str, str, str]:
    """name: of a skill; one that stands for a part of another has no limit of its own."""
    form = FORMS.get(key, ".2g")
    judged = limits.get(key) if name in ("", quality_allowance.SKILLS.get(key)) else None
    if judged is None:
        part = name and name not in quality_allowance.SKILLS.values()
        return *seen(figure, form), "", "" if part else "not judged"
    word = "at least" if key in quality_allowance.AT_LEAST else "at most"
    limit = f"{judged.limit:{form.replace('.2g', 'g')}}"
    return *seen(figure, form), f"{word} {limit}", quality_allowance.TOLD[judged.kept]


def verdict(record: QualityRecord) -> str:
    """Of all limits together, in a line."""
    if not record.judged:
        why = "its stage sets no limit" if record.role == "parent" else "limits are against the parent stage"
        return f"verdict: none, for {why}"
    by = {kept: [one for one in record.judged if one.kept == kept] for kept in ("more", "unclear")}
    told = [f"lost MORE than allowed: {', '.join(one.name for one in by['more'])}"] if by["more"] else []
    told += [f"cannot tell {one.name}" for one in by["unclear"]]
    if told and len(told) < len(record.judged):
        told.append("within all other limits")
    return f"verdict: {'; '.join(told) or 'ok: within all its limits'}"


def seen(figure: Figure, form: str) -> tuple[str, str]:
    return f"{figure.value:{form}}", f"{figure.low:{form}} .. {figure.high:{form}}"


def of_kind(texts: Texts) -> tuple[object, ...]:
    return (
        texts.kind,
        texts.texts,
        f"{texts.tokens:,}",
        f"{texts.kl.value:.2g}",
        f"{texts.top1.value:.2%}",
        f"{texts.ratio.value:.4f}",
        f"{texts.continued_kl.value:.2g}",
        f"{texts.continued_same.value:.1%}",
    )
