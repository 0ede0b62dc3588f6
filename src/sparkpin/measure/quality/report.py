"""A record as a person reads it."""

from __future__ import annotations

from collections.abc import Iterator

from sparkpin.core import terminal
from sparkpin.core.terminal import show
from sparkpin.measure.quality.skills import NEEDLES
from sparkpin.releases import quality_allowance
from sparkpin.releases.quality_record import Figure, Judged, QualityRecord, Standard, Texts

WHAT = ("what", "reference", "release", "seen", "95 % interval", "allowed")
KINDS = ("texts", "count", "tokens", "KL", "same first choice", "perplexity ratio", "KL decoding", "same words")
SCORES = ("lm-eval task", "metric", "samples", "reference", "release")
TOLD = {"within": "ok", "unclear": "unclear", "more": "MORE"}


def report(record: QualityRecord) -> None:
    show(f"{record.release} against {record.reference} ({record.role})")
    limits = {judged.name: judged for judged in record.judged}
    terminal.table(WHAT, list(rows(record, limits)))
    show()
    terminal.table(KINDS, [of_kind(texts) for texts in record.texts[1:]])
    if record.standard:
        show()
        terminal.table(SCORES, [of_task(one) for one in record.standard])
    for skill in record.skills:
        for failure in skill.failures if skill.name != NEEDLES else ():
            show(f"lost: {failure}")
    for note in record.notes:
        show(f"note: {note}")


def rows(record: QualityRecord, limits: dict[str, Judged]) -> Iterator[tuple[object, ...]]:
    texts = record.overall
    both = (terminal.figure(texts.perplexity_reference, 4), terminal.figure(texts.perplexity, 4))
    yield "KL, nats a token", "", "", *seen(texts.kl, ".2g"), allowed(limits.get("kl"))
    yield "same first choice", "", "", *seen(texts.top1, ".2%"), allowed(limits.get("top1"))
    yield "perplexity, ratio", *both, *seen(texts.ratio, ".4f"), allowed(limits.get("perplexity"))
    yield "KL while decoding", "", "", *seen(texts.continued_kl, ".2g"), allowed(limits.get("continued_kl"))
    yield "same words while decoding", "", "", *seen(texts.continued_same, ".1%"), ""
    keys = {name: key for key, name in quality_allowance.SKILLS.items()}
    for skill in record.skills:
        right = (f"{skill.reference} of {skill.asked}", f"{skill.release} of {skill.asked}")
        yield f"{skill.name}, lost", *right, *seen(skill.lost, ".1%"), allowed(limits.get(keys.get(skill.name, "")))


def seen(figure: Figure, form: str) -> tuple[str, str]:
    return f"{figure.value:{form}}", f"{figure.low:{form}} .. {figure.high:{form}}"


def allowed(judged: Judged | None) -> str:
    return f"{judged.limit:g}: {TOLD[judged.kept]}" if judged else ""


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


def of_task(one: Standard) -> tuple[object, ...]:
    scores = score(one.reference, one.reference_stderr), score(one.release, one.release_stderr)
    return (one.task, one.metric, one.samples, *scores)


def score(value: float, stderr: float | None) -> str:
    return f"{value:.4g}" if stderr is None else f"{value:.4g} ± {1.96 * stderr:.2g}"
