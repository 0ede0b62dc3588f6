"""How far a stage's numbers are from those of the stage below it: the log-probability of each token of one text.

An answer can survive wrong numbers: with all logits halved the likeliest token stays the likeliest. These do not.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from sparkpin.core.paths import Paths
from sparkpin.releases.record import Release, Releases
from sparkpin.smoke.answers import NotApplicable, require
from sparkpin.smoke.evidence import evidence_folder
from sparkpin.smoke.logprobs import logprobs_of
from sparkpin.smoke.subject import SmokeSubject

FILE = "logprobs.json"
SAME = 0.01  # nats: what the same text may differ by when it is asked again, on the mean


@dataclass(frozen=True)
class Reference:
    """What another release gave for a text: one log-probability for each of its tokens but the first."""

    release: str
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def drift(subject: SmokeSubject) -> str:
    """The text's log-probabilities, twice with another request between, and against the reference if there is one."""
    text = subject.expect.text
    tokens, first = logprobs_of(subject.client, subject.model, text)
    subject.complete(subject.expect.cases["completion"].request)
    same, second = logprobs_of(subject.client, subject.model, text)
    require(same == tokens, "asked again the text has other tokens")
    again = fmean(differences(first, second))
    require(again <= SAME, f"asked again the text differs by {again:.3f} on the mean, expected at most {SAME}")
    subject.leaves[FILE] = {"text": sha256(text), "tokens": list(tokens), "logprobs": list(first)}
    told = f"{len(first)} tokens, on the mean {fmean(first):.2f}"
    own = Reference("", sha256(text), tokens, first)
    return f"{told}; {compared(own, subject.reference, subject.demands.drift, subject.demands.parent, told)}"


def compared(own: Reference, below: Reference | None, limit: float | None, stage: str | None, told: str) -> str:
    """How far it is from the stage below. Wrong or NotApplicable, which begin with `told`."""
    if limit is None:
        return "no stage below to compare with"
    if below is None:
        raise NotApplicable(
            f"{told}; no release of stage {stage} has passed and left its own to compare them with: test that first"
        )
    if below.text != own.text or below.tokens != own.tokens:
        raise NotApplicable(f"{told}; {below.release} was asked another text, or has other tokens")
    seen = differences(own.logprobs, below.logprobs)
    detail = f"{fmean(seen):.4f} from {below.release}, expected at most {limit:g}"
    require(fmean(seen) <= limit, f"{told}; {detail}; the most {max(seen):.2f}")
    return detail


def differences(one: tuple[float, ...], other: tuple[float, ...]) -> list[float]:
    return [abs(a - b) for a, b in zip(one, other, strict=True)]


def reference(paths: Paths, release: Release) -> Reference | None:
    """Of the newest release of the stage below, of the same recipe and model, that has passed and left its own."""
    if not release.demands.parent:
        return None
    known, _ = Releases(paths).readable(release.recipe)
    for other in reversed(known):
        if other.stage == release.demands.parent and other.model == release.model and other.smoke_passed:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                return read(other.tag, json.loads((evidence_folder(paths, other) / FILE).read_text()))
    return None


def read(tag: str, value: dict[str, Any]) -> Reference:
    """ValueError and the like for what is none."""
    tokens, logprobs = tuple(value["tokens"]), tuple(float(one) for one in value["logprobs"])
    if len(tokens) != len(logprobs):
        raise ValueError(f"{len(tokens)} tokens, {len(logprobs)} log-probabilities")
    return Reference(tag, str(value["text"]), tokens, logprobs)
