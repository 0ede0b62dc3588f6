"""Two measurements, joined, and the record of that as a person reads it. Pure, but for what `report` prints."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from sparkpin.core import terminal
from sparkpin.core.errors import InputError
from sparkpin.core.terminal import show
from sparkpin.measure.quality import distance
from sparkpin.measure.quality.corpus import NEEDLES, SkillAnswer
from sparkpin.measure.quality.run import QualityMeasured, Reading
from sparkpin.measure.statistics import paired_interval
from sparkpin.releases import quality_allowance
from sparkpin.releases.quality_record import Figure, Judged, QualityRecord, Skill, Texts

ALL = "all"
SHARE = (0.0, 1.0)
NATS = (0.0, -distance.LEAST)  # a token
# Of the interval that is called one of 95 %: few texts that differ much hold less than that
# (benchmarks/interval_coverage.py).
CONFIDENCE = 0.98
CHANGE = (distance.LEAST, -distance.LEAST)  # of a log-probability

WHAT = ("figure", "seen", "95 % interval", "allowed", "verdict")
FAILURES = 8  # told of each skill
FORMS = {"top1": ".2%", "perplexity": ".4f", "tool_calls": ".1%", "needles": ".1%"}  # of the others ".2g"

AnswerPair = tuple[SkillAnswer, SkillAnswer]  # the reference's, the release's


# Of one text: positions compared, and what adds up over them. P is the reference, Q the release.
Sums = dict[str, float]


def texts(reference: QualityMeasured, release: QualityMeasured, top: int) -> tuple[Texts, ...]:
    """All of them, then each kind. InputError where the two do not read the same tokens."""
    others = {reading.name: reading for reading in release.readings}
    sums = [(one.kind, sums_of(one, others[one.name], top)) for one in reference.readings]
    kinds = sorted({kind for kind, _ in sums})
    every = [row for _, row in sums]
    return (figures(ALL, every), *(figures(kind, [row for of, row in sums if of == kind]) for kind in kinds))


def sums_of(p: Reading, q: Reading, top: int) -> Sums:
    count = min(len(p.forced), len(q.forced))  # a recipe with less room reads the start alone
    a, b = p.forced[:count], q.forced[:count]
    if p.first != q.first or not np.array_equal(a.tokens, b.tokens):
        raise InputError(
            f"the two make other tokens of the text {p.name}: log-probabilities of other tokens cannot be compared",
            next_step="name a reference with --against that has the same tokenizer",
        )
    # A continuation of another prompt says nothing.
    compared, same = distance.until_they_part(p.continued, q.continued) if len(p.forced) == len(q.forced) else (0, 0)
    c, d = p.continued[:compared], q.continued[:compared]
    return {
        "tokens": count,
        "kl": float(distance.kl(a, b, top).sum()),
        "same": int(distance.agreement(a, b).sum()),
        "nll_p": float(-a.chosen.sum()),
        "nll_q": float(-b.chosen.sum()),
        "continued": compared,
        "continued_kl": float(distance.kl(c, d, top).sum()),
        "continued_same": same,
        "length": max(len(p.continued), len(q.continued)) if compared else 0,
    }


def figures(kind: str, sums: Sequence[Sums]) -> Texts:
    by = {name: [one[name] for one in sums] for name in sums[0]}
    tokens = by["tokens"]
    changes = [q - p for p, q in zip(by["nll_p"], by["nll_q"], strict=True)]
    return Texts(
        kind=kind,
        texts=len(sums),
        tokens=int(sum(tokens)),
        kl=ratio(by["kl"], tokens, NATS),
        top1=ratio(by["same"], tokens, SHARE),
        perplexity_reference=math.exp(sum(by["nll_p"]) / sum(tokens)),
        perplexity=math.exp(sum(by["nll_q"]) / sum(tokens)),
        ratio=ratio(changes, tokens, CHANGE, math.exp),
        continued=int(sum(by["continued"])),
        continued_kl=ratio(by["continued_kl"], by["continued"], NATS),
        continued_same=ratio(by["continued_same"], by["length"], SHARE),
    )


def skills(reference: QualityMeasured, release: QualityMeasured) -> tuple[Skill, ...]:
    """Each skill; needles of several lengths together, too. What was asked of only one of the two is left out."""
    others = {(one.skill, one.name): one for one in release.asked}
    pairs = [(one, others[one.skill, one.name]) for one in reference.asked if (one.skill, one.name) in others]
    return tuple(skill(name, chosen) for name, chosen in groups(pairs).items())


def asked_alone(reference: QualityMeasured, release: QualityMeasured) -> tuple[str, ...]:
    """Notes on what `skills` leaves out: needles of another length where one of the two has less room, say."""
    notes = []
    for who, one, other in (("reference", reference, release), ("release", release, reference)):
        common = {(asked.skill, asked.name) for asked in other.asked}
        counts = Counter(asked.skill for asked in one.asked if (asked.skill, asked.name) not in common)
        notes += [f"{skill}: {count} asked of the {who} alone, so not compared" for skill, count in counts.items()]
    return tuple(notes)


def groups(pairs: Sequence[AnswerPair]) -> dict[str, list[AnswerPair]]:
    found: dict[str, list[AnswerPair]] = {}
    for pair in pairs:
        found.setdefault(pair[0].skill, []).append(pair)
    lengths = {name: found.pop(name) for name in list(found) if name.startswith(NEEDLES)}
    if lengths:
        found[NEEDLES] = [pair for some in lengths.values() for pair in some]
    return found | (lengths if len(lengths) > 1 else {})


def skill(name: str, pairs: Sequence[AnswerPair]) -> Skill:
    worse = [f"{q.name}: {q.detail}" for p, q in pairs if p.right and not q.right]
    return Skill(
        name=name,
        asked=len(pairs),
        reference=sum(p.right for p, _ in pairs),
        release=sum(q.right for _, q in pairs),
        lost=lost([p.right for p, _ in pairs], [q.right for _, q in pairs]),
        failures=tuple(worse),
    )


def ratio(
    numerators: Sequence[float],
    denominators: Sequence[float],
    span: tuple[float, float],
    shape: Callable[[float], float] = float,
) -> Figure:
    """Sum by sum over texts, shaped by a growing function.

    Tokens of one text are not independent of each other, so the text is the unit. Both releases read the same texts,
    and a numerator is already of the pair. Each text stands for what the ratio would be if all were like it,
    linearised, so that their mean is the ratio. span: the least and the greatest that it can be, which is all that
    one text says.
    """
    texts = [(above, below) for above, below in zip(numerators, denominators, strict=True) if below > 0]
    total = sum(below for _, below in texts)
    value = sum(above for above, _ in texts) / total if texts else 0.0
    low, high = span if texts else (0.0, 0.0)
    if len(texts) > 1:
        each = [value + (above - value * below) * len(texts) / total for above, below in texts]
        _, least, most = paired_interval(each, CONFIDENCE)
        low, high = max(low, least), min(high, most)
    return Figure(value=shape(value), low=shape(low), high=shape(high))


def lost(reference: Sequence[bool], release: Sequence[bool]) -> Figure:
    """Share of the questions that one has right and the other wrong, less those the other way round."""
    count = len(reference)
    worse = sum(a and not b for a, b in zip(reference, release, strict=True))
    better = sum(b and not a for a, b in zip(reference, release, strict=True))
    low, high = quality_allowance.paired(worse, better, count)
    return Figure(value=(worse - better) / count, low=low, high=high)


def report(record: QualityRecord) -> None:
    show(f"{record.release} against {record.reference} ({record.role})")
    limits = {judged.name: judged for judged in record.judged}
    terminal.table(WHAT, list(rows(record, limits)))
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
    yield "same words while decoding", *with_interval(texts.continued_same, ".1%"), "", ""
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
        return *with_interval(figure, form), "", "" if part else "not judged"
    word = "at least" if key in quality_allowance.AT_LEAST else "at most"
    limit = f"{judged.limit:{form.replace('.2g', 'g')}}"
    return *with_interval(figure, form), f"{word} {limit}", quality_allowance.TOLD[judged.kept]


def verdict(record: QualityRecord) -> str:
    """Of all limits together, in a line."""
    if not record.judged:
        why = "its stage sets no limit" if record.role == "parent" else "limits are against the parent stage"
        return f"verdict: none, for {why}"
    by = {answer: [one for one in record.judged if one.kept == answer] for answer in ("more", "unclear")}
    parts = [f"lost MORE than allowed: {', '.join(one.name for one in by['more'])}"] if by["more"] else []
    parts += [f"cannot tell {one.name}" for one in by["unclear"]]
    if parts and len(parts) < len(record.judged):
        parts.append("within all other limits")
    return f"verdict: {'; '.join(parts) or 'ok: within all its limits'}"


def with_interval(figure: Figure, form: str) -> tuple[str, str]:
    return f"{figure.value:{form}}", f"{figure.low:{form}} .. {figure.high:{form}}"
