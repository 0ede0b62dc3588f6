"""Two measurements, joined: pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from sparkpin.core.errors import InputError
from sparkpin.measure.quality import distance, intervals
from sparkpin.measure.quality.measured import QualityMeasured, Reading, SkillAnswer
from sparkpin.measure.quality.skills import NEEDLES
from sparkpin.releases.quality_record import Skill, Texts

ALL = "all"
SHARE = (0.0, 1.0)
NATS = (0.0, -distance.LEAST)  # a token
CHANGE = (distance.LEAST, -distance.LEAST)  # of a log-probability


AnswerPair = tuple[SkillAnswer, SkillAnswer]  # the reference's, the release's


Sums = dict[str, float]
"""Of one text: positions compared, and what adds up over them. P is the reference, Q the release."""


def texts(reference: QualityMeasured, release: QualityMeasured, top: int) -> tuple[Texts, ...]:
    """All of them, then each kind. InputError where the two do not read the same tokens."""
    others = {reading.name: reading for reading in release.readings}
    sums = [(one.kind, sums_of(one, others[one.name], top)) for one in reference.readings]
    kinds = sorted({kind for kind, _ in sums})
    every = [row for _, row in sums]
    return (figures(ALL, every), *(figures(kind, [row for own, row in sums if own == kind]) for kind in kinds))


def sums_of(p: Reading, q: Reading, top: int) -> Sums:
    count = min(len(p.forced), len(q.forced))  # a recipe with less room reads the start alone
    a, b = p.forced.first(count), q.forced.first(count)
    if p.first != q.first or not np.array_equal(a.tokens, b.tokens):
        raise InputError(
            f"the two make other tokens of the text {p.name}: log-probabilities of other tokens cannot be compared",
            next_step="name a reference with --against that has the same tokenizer",
        )
    # A continuation of another prompt says nothing.
    compared, same = distance.until_they_part(p.continued, q.continued) if len(p.forced) == len(q.forced) else (0, 0)
    c, d = p.continued.first(compared), q.continued.first(compared)
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
        kl=intervals.ratio(by["kl"], tokens, NATS),
        top1=intervals.ratio(by["same"], tokens, SHARE),
        perplexity_reference=math.exp(sum(by["nll_p"]) / sum(tokens)),
        perplexity=math.exp(sum(by["nll_q"]) / sum(tokens)),
        ratio=intervals.ratio(changes, tokens, CHANGE, math.exp),
        continued=int(sum(by["continued"])),
        continued_kl=intervals.ratio(by["continued_kl"], by["continued"], NATS),
        continued_same=intervals.ratio(by["continued_same"], by["length"], SHARE),
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
        lost=intervals.lost([p.right for p, _ in pairs], [q.right for _, q in pairs]),
        failures=tuple(worse),
    )
