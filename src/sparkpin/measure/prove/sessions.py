"""Sessions as agents have them: a long system prompt with tools that all share, then turns that grow. Pure, seeded."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from sparkpin.pins.reading import read_yaml

Message = dict[str, Any]
Prompt = list[int | str]  # ids of tokens, or words with the blanks before them

UNKNOWN_BLOCK = 512  # tokens, where nobody tells how many a block of the cache has
SHARED = 1.2  # blocks that all sessions begin with
FIRST, STEP = 2.0, 0.5  # blocks of the first prompt, and that each turn adds
EDGES = (0, 1, -1, 2, -2, 17)  # tokens between the end of a prompt and that of a block
LEAST_ALIKE = 16  # tokens that prompts begin with alike, where they share a beginning
END = 24  # tokens at the end of a prompt that are never cut: where the answer begins
DATA = read_yaml(Path(__file__).with_name("prove.yaml"))
WORDS, TOOLS = DATA["words"].split(), DATA["tools"]


@dataclass(frozen=True)
class Turn:
    """What comes on top of the turn before and of its answer. tokens: that the prompt is to have with it."""

    session: int
    number: int
    messages: tuple[Message, ...]
    tokens: int


@dataclass(frozen=True)
class Shape:
    """block: tokens of a block of the server's cache; room: that a prompt may have; wordy: characters of a token."""

    seed: int
    sessions: int
    turns: int
    block: int
    room: int
    wordy: float


def lengths(shape: Shape) -> list[list[int]]:
    """Tokens of the prompts of each session. Whole blocks end about where a prompt does; halves are anywhere."""
    chance = random.Random(f"lengths {shape.seed}")
    found = []
    for session in range(shape.sessions):
        fitting = []
        for turn in range(shape.turns):
            blocks = FIRST + STEP * turn
            near = EDGES[(session + turn) % len(EDGES)]
            by = near if blocks % 1 == 0 else chance.randrange(-shape.block // 8, shape.block // 8)
            if (length := int(blocks * shape.block) + by) <= shape.room:
                fitting.append(length)
        found.append(fitting)
    return found


def text(chance: random.Random, characters: int) -> str:
    words, length = list[str](), 0
    while length < characters:
        words.append(chance.choice(WORDS) if chance.random() < 0.9 else str(chance.randrange(10_000)))
        length += len(words[-1]) + 1
    return " ".join(words)


def sessions(shape: Shape) -> list[Turn]:
    """Session by session, turn by turn. Texts are longer than wanted: tokens are cut, not characters."""
    system = text(random.Random(f"system {shape.seed}"), int(SHARED * shape.block * shape.wordy))
    found = []
    for session, fitting in enumerate(lengths(shape)):
        chance, before = random.Random(f"session {shape.seed} {session}"), 0
        for number, length in enumerate(fitting):
            words = text(chance, int((length - before) * shape.wordy * 1.2))
            user = {"role": "user", "content": words[: len(words) // 2] if number else words}
            messages = [{"role": "system", "content": system}, user] if not number else [user]
            if number:
                messages += called(f"call_{session}_{number}", chance, words[len(words) // 2 :])
            found.append(Turn(session, number, tuple(messages), length))
            before = length
    return found


def called(identity: str, chance: random.Random, result: str) -> list[Message]:
    """A call that the model made, and what the tool gave."""
    arguments = f'{{"path": "{chance.choice(WORDS)}/{chance.choice(WORDS)}"}}'
    call = {"id": identity, "type": "function", "function": {"name": "read_file", "arguments": arguments}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": identity, "content": result},
    ]


def fitted(ids: Prompt, length: int) -> Prompt:
    """Cut so many of the last tokens, but those at the very end, that `length` remain. Shorter ones stay."""
    over = len(ids) - length
    if over <= 0:
        return list(ids)
    begin = max(0, len(ids) - END - over)
    return [*ids[:begin], *ids[max(begin + over, len(ids) - END) :]]


def with_other_words(prompts: Sequence[Prompt], seed: int) -> list[Prompt]:
    """As long, and alike as far as they were: what depends on places is the same, the model's numbers are not. The
    words of the part that all share with the last are in another order."""
    last = prompts[-1]
    pairs = [zip(prompt, last, strict=False) for prompt in prompts]
    alike = [sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], each)) for each in pairs]
    end = min(len(last) // 3, *(length for length in alike if length >= LEAST_ALIKE), len(last))
    both = zip(prompts, alike, strict=True)
    return [reordered(prompt, seed, end) if length >= end else prompt for prompt, length in both]


def reordered(ids: Prompt, seed: int, end: int) -> Prompt:
    """The first `end` tokens in another order, the very first ones aside: as long, as common, and not the same."""
    begin = min(8, end // 2)
    middle = list(ids[begin:end])
    random.Random(f"other {seed}").shuffle(middle)
    return [*ids[:begin], *middle, *ids[end:]]
