"""Sessions as agents have them: a long system prompt with tools that all share, then turns that grow. Pure, seeded."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

UNKNOWN_BLOCK = 512  # tokens, where nobody tells how many a block of the cache has
SHARED = 1.2  # blocks that all sessions begin with
FIRST, STEP = 2.0, 0.5  # blocks of the first prompt, and that each turn adds
EDGES = (0, 1, -1, 2, -2, 17)  # tokens between the end of a prompt and that of a block
END = 24  # tokens at the end of a prompt that are never cut: where the answer begins
SAID = (
    "build cache commit config deploy error file flag graph hash image index issue kernel layer lock log manifest "
    "merge model module node parse patch path plan port queue record release report root schema script server session "
    "shard source stage state store stream table tag task test thread token tool trace tree update value vector "
    "verify version wheel worker çay defter göl yağmur"
)
WORDS = SAID.split()
TOOLS: tuple[dict[str, Any], ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": what,
            "parameters": {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]},
        },
    }
    for name, what, argument in (
        ("read_file", "Read a file of the project.", "path"),
        ("run", "Run a command and give what it prints.", "command"),
    )
)


@dataclass(frozen=True)
class Turn:
    """What comes on top of the turn before and of its answer. tokens: that the prompt is to have with it."""

    session: int
    number: int
    messages: tuple[Message, ...]
    tokens: int

    @property
    def name(self) -> str:
        return f"session {self.session + 1}, turn {self.number + 1}"


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
        own = []
        for turn in range(shape.turns):
            blocks = FIRST + STEP * turn
            whole = blocks == int(blocks)
            by = (
                EDGES[(session + turn) % len(EDGES)] if whole else chance.randrange(-shape.block // 8, shape.block // 8)
            )
            if (length := int(blocks * shape.block) + by) <= shape.room:
                own.append(length)
        found.append(own)
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
    for session, own in enumerate(lengths(shape)):
        chance, before = random.Random(f"session {shape.seed} {session}"), 0
        for number, length in enumerate(own):
            said = text(chance, int((length - before) * shape.wordy * 1.2))
            user = {"role": "user", "content": said[: len(said) // 2] if number else said}
            messages = [{"role": "system", "content": system}, user] if not number else [user]
            if number:
                messages += called(f"call_{session}_{number}", chance, said[len(said) // 2 :])
            found.append(Turn(session, number, tuple(messages), length))
            before = length
    return found


def called(identity: str, chance: random.Random, result: str) -> list[Message]:
    """A call that the model made, and what the tool gave."""
    name, argument = chance.choice((("read_file", "path"), ("run", "command")))
    arguments = f'{{"{argument}": "{chance.choice(WORDS)}/{chance.choice(WORDS)}"}}'
    call = {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": identity, "content": result},
    ]


def fitted(ids: Sequence[int], length: int) -> list[int]:
    """Cut so many of the last tokens, but those at the very end, that `length` remain. Shorter ones stay."""
    over = len(ids) - length
    if over <= 0:
        return list(ids)
    keep = max(0, len(ids) - END - over)
    return [*ids[:keep], *ids[max(keep + over, len(ids) - END) :]]


def other_text(ids: Sequence[int], seed: int) -> list[int]:
    """The first third in another order: as long, as common, and not the same."""
    return reordered(ids, seed, len(ids) // 3)


def reordered(ids: Sequence[int], seed: int, end: int) -> list[int]:
    """The first `end` tokens in another order, the very first ones aside."""
    begin = min(8, end // 2)
    middle = list(ids[begin:end])
    random.Random(f"other {seed}").shuffle(middle)
    return [*ids[:begin], *middle, *ids[end:]]
