"""The ways to come to the same prompt, each a list of requests. Pure: what is sent, and in what order."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from sparkpin.measure.prove.asking import Prompt
from sparkpin.measure.prove.sessions import Turn

AT_ONCE = 16
TOKENS = 16  # of an answer
READ_AT = (TOKENS - 1, TOKENS // 2)  # tokens of an answer that are read again, with its prompt
CONTROLS = 4  # prompts that are asked with other text


@dataclass(frozen=True)
class Step:
    """One request. key: which prompt's answer this is, None where nobody compares it; salt: requests with another one
    share no block of the cache.
    """

    prompt: Prompt
    salt: str
    key: int | None = None
    tokens: int = TOKENS


@dataclass(frozen=True)
class Pass:
    """cold: nothing of it may come from the cache. words: as a person says it."""

    name: str
    words: str
    cold: bool = False


COLD = Pass("cold", "cold, alone", cold=True)
COMPANY = Pass("company", f"cold, {AT_ONCE} at once", cold=True)
CONTROL = Pass("control", "other text in the first third", cold=True)
WARM = Pass("warm", "warm, turn by turn")
EVICTED = Pass("evicted", "warm, while others fill the cache")
READ = Pass("read", "decoded, then read as a prompt", cold=True)
TRIED = (WARM, EVICTED, COMPANY, READ)
"""Those in which something may be found, the simplest to repeat first."""
EVERY = (COLD, CONTROL, *TRIED)


def new_salt() -> str:
    return f"prove-{secrets.token_hex(8)}"


def company(prompts: Sequence[Prompt]) -> list[Step]:
    return [Step(prompt, new_salt(), key) for key, prompt in enumerate(prompts)]


def warm(prompts: Sequence[Prompt]) -> list[Step]:
    """All sessions share their beginning, each turn what came before it."""
    salt = new_salt()
    return [Step(prompt, salt, key) for key, prompt in enumerate(prompts)]


def evicted(prompts: Sequence[Prompt], turns: Sequence[Turn], fillers: Sequence[Prompt]) -> list[Step]:
    """Each session from the cache, with a part of it filled by strangers between two. Later ones find less."""
    own, other = new_salt(), new_salt()
    found = [Step(prompt, own, tokens=1) for prompt in prompts]
    sessions = sorted({turn.session for turn in turns})
    for place, session in enumerate(sessions):
        share = fillers[place * len(fillers) // len(sessions) : (place + 1) * len(fillers) // len(sessions)]
        found += [Step(filler, other, tokens=1) for filler in share]
        found += [Step(prompts[key], own, key) for key, turn in enumerate(turns) if turn.session == session]
    return found
