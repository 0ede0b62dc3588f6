"""What a stage may cost (`quality` of stages/*.yaml), against what was measured. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sparkpin.pins.schema import Quality
from sparkpin.releases.quality_record import Figure, Judged, Kept, Skill, Texts

SKILLS = {"tool_calls": "tool calls", "needles": "needles"}  # key of the stage's file -> name of the skill
AT_LEAST = ("top1",)  # of the others the limit is the most
# A uniform guess has the perplexity of the vocabulary's size, which no record holds; no model's vocabulary is larger.
GUESSING = 1_000_000
TOLD: dict[Kept, str] = {"within": "ok", "unclear": "cannot tell", "more": "MORE"}
Z = 1.959964


def judge(texts: Texts, skills: Sequence[Skill], allowed: Quality) -> tuple[Judged, ...]:
    """texts: of all kinds. One line for each limit that the stage sets and that could be measured: not of a skill of
    which the reference has none to lose.
    """
    figures: dict[str, Figure] = {"kl": texts.kl, "top1": texts.top1}
    figures |= {"perplexity": texts.ratio} if texts.perplexity_reference <= GUESSING else {}  # else it means nothing
    figures |= {"continued_kl": texts.continued_kl} if texts.continued else {}  # of no token it is 0
    by_name = {skill.name: skill for skill in skills if skill.reference}
    figures |= {key: by_name[name].lost for key, name in SKILLS.items() if name in by_name}
    limits = limits_of(allowed)
    return tuple(
        Judged(name=name, limit=limits[name], seen=figure, kept=kept_of(name, figure, limits[name]))
        for name, figure in figures.items()
        if name in limits
    )


def kept_of(name: str, figure: Figure, limit: float) -> Kept:
    return verdict_of(figure, limit, least=name in AT_LEAST, room=room_of(name, limit))


def limits_of(allowed: Quality) -> dict[str, float]:
    """Those that the stage sets."""
    return {name: limit for name, limit in allowed.model_dump().items() if limit is not None}


def notes(texts: Texts, skills: Sequence[Skill], allowed: Quality) -> tuple[str, ...]:
    """Which limits that the stage sets judge nothing."""
    judged = {line.name for line in judge(texts, skills, allowed)}
    lacking = ", ".join(name for name in limits_of(allowed) if name not in judged)
    return (f"not judged: {lacking} (it was not asked, or the reference has nothing to lose)",) if lacking else ()


def verdict_of(figure: Figure, limit: float, *, least: bool, room: float) -> Kept:
    """least: the limit is the least value; room: what may be lost, which an interval that tells is narrower than."""
    value, best, worst = figure.value, figure.low, figure.high
    if least:
        value, best, worst, limit = -figure.value, -figure.high, -figure.low, -limit
    if best > limit:
        return "more"
    if value > limit or (worst > limit and worst - best > room):
        return "unclear"
    return "within"


def room_of(name: str, limit: float) -> float:
    """What a limit lets a release lose, counted from no loss at all."""
    return abs(limit - 1) if name in ("top1", "perplexity") else limit


def paired(worse: float, better: float, count: float) -> tuple[float, float]:
    """Ends of the 95 % interval for the share of questions lost, of `count` that both were asked: Bonett and Price's,
    for a bootstrap over questions on which both agree would have no width."""
    p, q = (worse + 1) / (count + 2), (better + 1) / (count + 2)
    half = Z * math.sqrt((p + q - (p - q) ** 2) / (count + 2))
    return max(-1.0, p - q - half), min(1.0, p - q + half)


def line(judged: Judged) -> str:
    """For a person."""
    word = "at least" if judged.name in AT_LEAST else "at most"
    return f"{judged.name}: {TOLD[judged.kept]}, {judged.seen.text()}, allowed {word} {judged.limit:g}"
