"""What a stage may cost (`quality` of stages/*.yaml), against what was measured. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from sparkpin.pins.schema import Quality
from sparkpin.releases.quality_record import Figure, Judged, Kept, QualityRecord, Skill, Texts

SKILLS = {"tool_calls": "tool calls", "needles": "needles"}  # key of the stage's file -> name of the skill
AT_LEAST = ("top1",)  # of the others the limit is the most
# A uniform guess has the perplexity of the vocabulary's size, which no record holds; no model's vocabulary is larger.
GUESSING = 1_000_000


def judge(texts: Texts, skills: Sequence[Skill], allowed: Quality) -> tuple[Judged, ...]:
    """texts: of all kinds. One line for each limit that the stage sets and that could be measured."""
    seen: dict[str, Figure] = {"kl": texts.kl, "top1": texts.top1}
    seen |= {} if is_guessing(texts) else {"perplexity": texts.ratio}
    seen |= {"continued_kl": texts.continued_kl} if texts.continued else {}  # of no token it is 0
    seen |= {key: skill.lost for key, name in SKILLS.items() for skill in skills if skill.name == name}
    limits = allowed.model_dump()
    return tuple(
        Judged(name=name, limit=limits[name], seen=figure, kept=kept(figure, limits[name], least=name in AT_LEAST))
        for name, figure in seen.items()
        if limits[name] is not None
    )


def is_guessing(texts: Texts) -> bool:
    """Whether the reference is worse than a uniform guess: then a ratio to its perplexity means nothing."""
    return texts.perplexity_reference > GUESSING


def notes(texts: Texts, allowed: Quality) -> tuple[str, ...]:
    if allowed.perplexity is None or not is_guessing(texts):
        return ()
    return ("perplexity is not judged: the reference is worse than a uniform guess",)


def kept(figure: Figure, limit: float, *, least: bool) -> Kept:
    if least:
        return "within" if figure.value >= limit else "more" if figure.high < limit else "unclear"
    return "within" if figure.value <= limit else "more" if figure.low > limit else "unclear"


def again(record: QualityRecord, allowed: Quality) -> tuple[Judged, ...]:
    """A record against what the stage allows now."""
    return judge(record.overall, record.skills, allowed)


def unmeasured(judged: Sequence[Judged], allowed: Quality) -> tuple[str, ...]:
    """Limits that the stage sets and nobody could hold against anything: a prompt too long for the recipe, say. Not
    those that `notes` gives a reason for.
    """
    names = {line.name for line in judged} | {"perplexity"}  # it is always measured
    return tuple(name for name, limit in allowed.model_dump().items() if limit is not None and name not in names)


def line(judged: Judged) -> str:
    """For a person."""
    word = "at least" if judged.name in AT_LEAST else "at most"
    return f"{measured(judged)}{word} {judged.limit:g}"


def measured(judged: Judged) -> str:
    """What a line begins with: all of it but the limit."""
    told = {"within": "ok", "unclear": "UNCLEAR", "more": "MORE"}[judged.kept]
    return f"{judged.name}: {told}, {judged.seen.text()}, allowed "
