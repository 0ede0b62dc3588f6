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
MOST = 100_000  # of samples that are worth a mention


def judge(texts: Texts, skills: Sequence[Skill], allowed: Quality) -> tuple[Judged, ...]:
    """texts: of all kinds. One line for each limit that the stage sets and that could be measured: not of a skill of
    which the reference has none to lose.
    """
    seen: dict[str, Figure] = {"kl": texts.kl, "top1": texts.top1}
    seen |= {} if is_guessing(texts) else {"perplexity": texts.ratio}
    seen |= {"continued_kl": texts.continued_kl} if texts.continued else {}  # of no token it is 0
    by_name = {skill.name: skill for skill in skills if skill.reference}
    seen |= {key: by_name[name].lost for key, name in SKILLS.items() if name in by_name}
    limits = limits_of(allowed)
    return tuple(
        Judged(name=name, limit=limits[name], seen=figure, kept=kept_of(name, figure, limits[name]))
        for name, figure in seen.items()
        if name in limits
    )


def kept_of(name: str, figure: Figure, limit: float) -> Kept:
    return kept(figure, limit, least=name in AT_LEAST, room=room_of(name, limit))


def limits_of(allowed: Quality) -> dict[str, float]:
    """Those that the stage sets."""
    return {name: limit for name, limit in allowed.model_dump().items() if limit is not None}


def is_guessing(texts: Texts) -> bool:
    """Whether the reference is worse than a uniform guess: then a ratio to its perplexity means nothing."""
    return texts.perplexity_reference > GUESSING


def notes(texts: Texts, skills: Sequence[Skill], allowed: Quality) -> tuple[str, ...]:
    """Why a limit that the stage sets judges nothing."""
    limits = limits_of(allowed)
    guess = "perplexity" in limits and is_guessing(texts)
    found = ["perplexity is not judged: the reference is worse than a uniform guess"] if guess else []
    without = [SKILLS[key] for key in without_reference(skills) if key in limits]
    return (*found, *(f"{name} are not judged: the reference has none right, so none can be lost" for name in without))


def without_reference(skills: Sequence[Skill]) -> tuple[str, ...]:
    """Keys of the skills of which the reference has nothing right."""
    return tuple(key for key, name in SKILLS.items() for one in skills if one.name == name and not one.reference)


def kept(figure: Figure, limit: float, *, least: bool, room: float | None = None) -> Kept:
    """room: what may be lost, which an interval that tells is narrower than; None for as much as one likes."""
    value, best, worst = (figure.value, figure.low, figure.high)
    if least:
        value, best, worst, limit = -figure.value, -figure.high, -figure.low, -limit
    if best > limit:
        return "more"
    if value > limit or (worst > limit and room is not None and worst - best > room):
        return "unclear"
    return "within"


def room_of(name: str, limit: float) -> float:
    """What a limit lets a release lose, counted from no loss at all."""
    return abs(limit - 1) if name in ("top1", "perplexity") else limit


def unmeasured(judged: Sequence[Judged], skills: Sequence[Skill], allowed: Quality) -> tuple[str, ...]:
    """Limits that the stage sets and nobody could hold against anything: a prompt too long for the recipe, say. Not
    those that `notes` gives a reason for.
    """
    names = {line.name for line in judged} | {"perplexity", *without_reference(skills)}  # those are always measured
    return tuple(name for name in limits_of(allowed) if name not in names)


def would_tell(judged: Judged, texts: int, skills: Sequence[Skill]) -> str:
    """How many samples would tell, were each as these are: `about 54 questions would tell, 10 were asked`."""
    skill = next((skill for skill in skills if skill.name == SKILLS.get(judged.name)), None)
    count = needed_questions(skill, judged.limit) if skill else needed_texts(judged, texts)
    what, done = ("questions", f"{skill.asked} were asked") if skill else ("texts", f"{texts} were read")
    return f"about {count:,} {what} would tell, {done}" if count else f"no more {what} would: the loss is at the limit"


def needed_texts(judged: Judged, texts: int) -> int:
    """0 where none would do: the loss is the limit. A side of an interval shrinks with the square root of its texts."""
    figure = judged.seen
    distance = abs(judged.limit - figure.value)
    side = figure.high - figure.value if judged.limit > figure.value else figure.value - figure.low
    return max(1, math.ceil(texts * (side / distance) ** 2)) if side < math.sqrt(MOST) * distance else 0


def needed_questions(skill: Skill, limit: float) -> int:
    """0 where none would do."""
    net = skill.reference - skill.release
    worse = max(len(skill.failures), net, 0) / skill.asked
    better = worse - net / skill.asked
    count = float(skill.asked)
    while count < MOST:
        low, high = paired(worse * count, better * count, count)
        if high <= limit or low > limit:
            return math.ceil(count)
        count *= 1.02
    return 0


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
