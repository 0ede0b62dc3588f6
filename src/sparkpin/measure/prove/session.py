"""The requests that led to a difference, all of them, in a file from which others can send them again."""

from __future__ import annotations

import dataclasses
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, TypeAdapter
from pydantic.dataclasses import dataclass

from sparkpin.core import files
from sparkpin.measure.prove import judging, passes
from sparkpin.measure.prove.asking import ProvedEndpoint
from sparkpin.measure.prove.passes import TOKENS, Step
from sparkpin.measure.prove.record import STRICT
from sparkpin.measure.prove.run import Proof, read_distance, reading, send
from sparkpin.measure.prove.sessions import reordered
from sparkpin.measure.quality.asking import TOP

LEAST_ALIKE = 16  # tokens that requests begin with alike, where they share a beginning
HOW = (
    "POST the steps to /v1/completions, in order or all at once: prompt, cache_salt (salt), max_tokens (tokens), "
    f"temperature 0, logprobs {TOP}. Then send the last prompt again with a new cache_salt, with `read` followed by "
    "the tokens of its answer. The log-probabilities should be the same."
)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Session:
    """The answer to the last of `steps` is further from the same prompt cold than `bound`, in nats.

    read: its tokens are compared with the same ones read as a prompt. answers: each token and its log-probability, of
    that answer and of those that it was compared with.
    """

    schema: Literal[1] = 1
    how: str = HOW
    seen: str
    seed: int
    model: str
    vllm: str
    difference: FiniteFloat
    bound: FiniteFloat
    at_once: bool
    read: bool
    steps: Annotated[tuple[Step, ...], Field(min_length=1)]
    answers: tuple[tuple[tuple[int, float], ...], ...]


FORMAT = TypeAdapter(Session)


def session_of(proof: Proof, one: passes.Pass, key: int, difference: float, bound: float) -> Session:
    """All that was sent until that answer, which comes last, and what was sent at the same time."""
    cold, said = proof.cold[key], [said for own, said in proof.done[one.name].said if own == key]
    steps = [Step(proof.prompts[key], "", key)]
    if one is not passes.READ:
        sent = proof.sent[one.name]
        last = max(place for place, step in enumerate(sent) if step.key == key)
        steps = [*sent[:last], *(sent[last + 1 :] if one is passes.COMPANY else []), sent[last]]
    answers = [cold, *said] if one is passes.READ else [said[-1], cold]
    return Session(
        seen=f"{one.words}, {proof.turns[key].name}",
        seed=proof.seed,
        model=proof.met.model,
        vllm=proof.met.version,
        difference=difference,
        bound=bound,
        at_once=one is passes.COMPANY,
        read=one is passes.READ,
        steps=tuple(steps),
        answers=tuple(
            tuple(zip(each.rows.tokens.tolist(), each.rows.chosen.tolist(), strict=True)) for each in answers
        ),
    )


def repeated(met: ProvedEndpoint, session: Session) -> float:
    """How far the answers are apart, in nats, when all is sent again with new salts."""
    new = dict[str, str]()
    steps = [dataclasses.replace(step, salt=new.setdefault(step.salt, passes.new_salt())) for step in session.steps]
    *_, seen = send(met, steps, at_once=session.at_once)
    prompt = steps[-1].prompt
    if session.read:
        return read_distance(seen, list(send(met, reading(prompt, seen, 0))))
    return judging.distance(met.ask(prompt, passes.new_salt(), TOKENS).rows, seen.rows)


def with_other_words(session: Session, seed: int) -> Session:
    """Requests as long, and alike as far as they were: what depends on places is the same, the model's numbers are not.
    The words of the part that all share are in another order."""
    last = session.steps[-1].prompt
    pairs = [zip(step.prompt, last, strict=False) for step in session.steps]
    alike = [sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], each)) for each in pairs]
    end = min(len(last) // 3, *(length for length in alike if length >= LEAST_ALIKE), len(last))
    steps = [
        dataclasses.replace(step, prompt=reordered(step.prompt, seed, end)) if length >= end else step
        for step, length in zip(session.steps, alike, strict=True)
    ]
    return dataclasses.replace(session, steps=tuple(steps))


def write(path: Path, session: Session) -> None:
    with files.atomic_file(path) as file:
        file.write(FORMAT.dump_json(session) + b"\n")
