"""A difference that was seen: seen again, made as short as it gets, and written down so that others can see it."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkpin.core import files
from sparkpin.core.errors import InputError
from sparkpin.image.listing_diff import common
from sparkpin.measure.prove import judging, passes
from sparkpin.measure.prove.asking import PATH, ProvedEndpoint, Said
from sparkpin.measure.prove.passes import TOKENS, Pass, Step
from sparkpin.measure.prove.run import Proof, read_distance, send
from sparkpin.measure.prove.sessions import reordered
from sparkpin.measure.quality.distance import Rows
from sparkpin.smoke.answers import Wrong
from sparkpin.smoke.replies import Fault

AGAIN = 2  # tries to see it once more
TRIES = 12  # of leaving out requests
SECONDS = 60.0  # that all of them may take
LEAST_ALIKE = 16  # tokens that requests begin with alike, where they share a beginning
RETOLD = 5  # tries with other words
HOW = (
    "Send the requests in order; those of one `wave` other than 0 at once. Then send the last one "
    "again with a cache_salt of its own (`alone`). The two answers should be the same."
)
HOW_READ = (
    "Send the request. Then send `alone`: its prompt with the first `place` tokens of its answer, with a cache_salt of "
    "its own. The token that follows should have the log-probabilities that it was decoded with."
)


@dataclass(frozen=True)
class Trial:
    """Requests whose last one is further from the same one alone than `bound`. place: of the token of its answer that
    is compared with the same one read, None for the whole answer."""

    steps: tuple[Step, ...]
    bound: float
    place: int | None = None


@dataclass(frozen=True)
class Tried:
    distance: float
    seen: Said
    alone: Said


def trial_of(proof: Proof, one: Pass, key: int, bound: float) -> Trial:
    """The requests of a pass up to that answer, which comes last.

    Of what was read again, the token that is furthest off is compared.
    """
    if one is passes.READ:
        return Trial((Step(proof.prompts[key], "", key),), bound, proof.furthest_read(key)[0])
    steps = proof.sent[one.name]
    last = next(place for place, step in enumerate(steps) if step.key == key)
    end = last + 1
    while end < len(steps) and steps[last].wave and steps[end].wave == steps[last].wave:
        end += 1
    return Trial((*steps[:last], *steps[last + 1 : end], steps[last]), bound)


def tried(met: ProvedEndpoint, proof: Proof, trial: Trial) -> Tried:
    """Sent with new salts; then its last request alone."""
    new = dict[str, str]()
    steps = [dataclasses.replace(step, salt=new.setdefault(step.salt, next(proof.salt))) for step in trial.steps]
    for group in passes.waves(steps):
        seen = send(met, group)[-1]
    prompt = steps[-1].prompt
    if trial.place is None:
        alone = met.ask(prompt, next(proof.salt), TOKENS)
        return Tried(judging.distance(alone.rows, seen.rows), seen, alone)
    place, before = said_before(trial.place, seen)
    alone = met.ask([*prompt, *before], next(proof.salt), 1)
    return Tried(read_distance(seen, alone, place), seen, alone)


def said_before(place: int, seen: Said) -> tuple[int, list[int]]:
    """The place of a token in an answer, its last one where it is shorter, and the tokens before it."""
    answer = [int(token) for token in seen.rows.tokens]
    place = min(place, len(answer) - 1)
    return place, answer[:place]


def with_other_words(trial: Trial, seed: int) -> Trial:
    """Requests as long, and alike as far as they were: what depends on places is the same, the model's numbers are not.
    The words of the part that all share are in another order."""
    last = trial.steps[-1].prompt
    alike = [common(step.prompt, last) for step in trial.steps]
    end = min(len(last) // 3, *(length for length in alike if length >= LEAST_ALIKE), len(last))
    prompts = [
        reordered(step.prompt, seed, end) if length >= end else step.prompt
        for step, length in zip(trial.steps, alike, strict=True)
    ]
    steps = [dataclasses.replace(step, prompt=prompt) for step, prompt in zip(trial.steps, prompts, strict=True)]
    return dataclasses.replace(trial, steps=tuple(steps))


def retold(met: ProvedEndpoint, proof: Proof, trial: Trial) -> int:
    """How many of RETOLD tries with other words show a difference, too."""
    others = (with_other_words(trial, seed) for seed in range(RETOLD))
    return sum(tried(met, proof, other).distance > trial.bound for other in others)


def fewer(steps: Sequence[Step], shows: Callable[[Sequence[Step]], bool], tries: int) -> list[Step]:
    """Leave out halves, quarters, ... and single steps while what is left shows it; the last step always stays."""
    left, size = list(steps), max(1, (len(steps) - 1) // 2)
    while tries and len(left) > 1:
        place, shorter = 0, False
        while place < len(left) - 1 and tries:
            trial = [*left[:place], *left[min(place + size, len(left) - 1) :]]
            tries -= 1
            if shows(trial):
                left, shorter = trial, True
            else:
                place += size
        if size == 1 and not shorter:
            break
        size = max(1, size // 2)
    return left


def shortest(met: ProvedEndpoint, proof: Proof, trial: Trial) -> tuple[Trial, Tried, int]:
    """The shortest trial that was found, what it showed, and how often the first one showed it again. Where it never
    did, that one stays. A server that dies on the way loses nothing of it."""
    until = time.monotonic() + SECONDS
    first = [tried(met, proof, trial) for _ in range(AGAIN)]
    again = sum(one.distance > trial.bound for one in first)
    best, shown = trial, max(first, key=lambda one: one.distance)
    if not again:
        return best, shown, again

    def shows(steps: Sequence[Step]) -> bool:
        nonlocal best, shown
        if time.monotonic() > until:
            return False
        attempt = dataclasses.replace(trial, steps=tuple(steps))
        seen = tried(met, proof, attempt)
        if seen.distance <= trial.bound:
            return False
        best, shown = attempt, seen
        return True

    try:
        fewer(best.steps, shows, TRIES)
    except (Wrong, Fault) as fault:
        proof.note(f"the session may not be the shortest: {fault}")
    return best, shown, again


def write(path: Path, met: ProvedEndpoint, trial: Trial, shown: Tried, words: str) -> None:
    """A line of JSON for what it is, one for each request, one for the request alone, one for the answers."""
    prompt, place = trial.steps[-1].prompt, trial.place
    alone = met.body(prompt, "alone", TOKENS)
    if place is not None:
        place, before = said_before(place, shown.seen)
        alone = met.body([*prompt, *before], "alone", 1)
    head = {
        "sparkpin_prove": 1,
        "seen": words,
        "difference": round(shown.distance, 4),
        "bound": round(trial.bound, 4),
        "model": met.model,
        "vllm": met.version,
        "path": PATH,
        "place": place,
        "how": HOW if place is None else HOW_READ,
    }
    lines: list[dict[str, Any]] = [head]
    lines += [{"wave": step.wave, "body": met.body(step.prompt, step.salt, step.tokens)} for step in trial.steps]
    lines += [{"alone": alone}, {"answer": as_json(shown.seen.rows), "answer_alone": as_json(shown.alone.rows)}]
    with files.atomic_file(path) as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines).encode())


def as_json(rows: Rows) -> dict[str, Any]:
    return {name: value.tolist() for name, value in vars(rows).items()}


def read(path: Path) -> tuple[Trial, dict[str, Any]]:
    """The trial of a file that `write` wrote, and its first line. InputError for another file."""
    try:
        head, *lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
        found = []
        for line in lines[:-2]:
            body = line["body"]
            found.append(Step(body["prompt"], body["cache_salt"], 0, body["max_tokens"], line["wave"]))
        trial, place = Trial(tuple(found), float(head["bound"]), head["place"]), head["place"]
        if head["sparkpin_prove"] != 1 or not found:
            raise KeyError("sparkpin_prove")
        head["difference"] = float(head["difference"])
        if not math.isfinite(trial.bound + head["difference"]) or not (place is None or type(place) is int):
            raise ValueError("bound, difference or place is no number")
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise InputError(
            f"{path}: got no session of invoke prove ({type(error).__name__}: {error})",
            next_step="name the file that its verdict names, ending in -session.jsonl",
        ) from None
    return trial, head
