"""Requests that are refused before vLLM sees them: each ends its engine, or keeps other clients waiting for seconds.

Standard library alone. The project's tests/adversary holds every row against a real server. No agent comes near a
limit.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

VALUES = 300_000  # in a body's JSON: a prompt of 262,144 token ids has fewer
DEPTH = 64  # levels of a body's JSON
SIZE = 1_500_000  # characters and values: more than 262,144 tokens of code have
GRAMMAR = 65_536  # characters and values; xgrammar's time grows with them
STOPS = 120  # 128 with the model's own ends
WORDS = 512  # bytes; each word is tokenized twice, into 1,024 tokens in all at most, none of less than a byte
INTEGERS = range(-(2**63), 2**64)  # of the message to the engine; anything else is answered 500
DIGITS = 40  # of an integer anywhere: reading one takes time that grows with their square
CONTAINERS = (dict, list)


@dataclass(frozen=True)
class Row:
    """path: a regular expression that the whole path must match. fields: of the body; none: the body itself.

    condition: whether a field's value is refused; only one that is there is asked. kills: what vLLM of a release does
    otherwise.
    """

    path: str
    fields: tuple[str, ...]
    condition: Callable[[Any], bool]
    reason: str
    kills: str

    def meets(self, path: str, body: dict[str, Any]) -> str | None:
        """The reason, with the field that is refused."""
        if not re.fullmatch(self.path, path):
            return None
        if not self.fields:
            return self.reason if self.condition(body) else None
        met = (name for name in self.fields if body.get(name) is not None and self.condition(body[name]))
        return next((f"{name}: {self.reason}" for name in met), None)


def values(value: Any) -> Iterator[Any]:
    """Each value and key in it, itself first."""
    left = [value]
    while left:
        value = left.pop()
        yield value
        if isinstance(value, dict):
            left += [part for pair in value.items() for part in pair]
        elif isinstance(value, list):
            left += value


def larger(limit: int) -> Callable[[Any], bool]:
    def check(value: Any) -> bool:
        sizes = accumulate(len(part) if isinstance(part, str) else 1 for part in values(value))
        return any(size > limit for size in sizes)

    return check


def no_number(body: Any) -> bool:
    """NaN, an infinity, or an integer that the engine cannot be sent."""
    return any(
        (isinstance(value, float) and not math.isfinite(value)) or (isinstance(value, int) and value not in INTEGERS)
        for value in body.values()
    )


def more_than(sequences: int) -> Callable[[Any], bool]:
    def check(body: Any) -> bool:
        """Prompts times answers. vLLM takes "100" and 100.0 for a number, too."""
        prompts, answers = body.get("prompt"), body.get("n")
        if answers is not None and type(answers) is not int:
            return True
        count = len(prompts) if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int) else 1
        return count * (1 if answers is None else answers) > sequences

    return check


def forced(body: Any) -> bool:
    """Tools that have to be called are a grammar."""
    choice = body.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    return kind not in (None, "auto", "none") and larger(GRAMMAR)(body.get("tools"))


def over(limit: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | dict) and len(value) > limit


def wordy(value: Any) -> bool:
    words = value if isinstance(value, list) else []
    return over(STOPS)(value) or sum(len(str(word).encode(errors="replace")) + 1 for word in words) > WORDS


SCORES = "0.32: vllm-project/vllm#42592; 0.33 answers 500, or waits for 5,000 items"
V2 = "0.33 on an H200, and as is read 0.32 on GPUs: the V2 model runner's tables are full"
ANSWERS = "/v1/completions|/v1/chat/completions(/batch)?|/invocations|/inference/v1/generate"
GRAMMARS = ("response_format", "structured_outputs", "text", "output_format", "output_config")


def rows(sequences: int) -> tuple[Row, ...]:
    """sequences: that the server runs at a time, its `--max-num-seqs`. A request may ask for as many, and waits for
    none of its own then."""
    at_once = f"at once: the server runs {sequences} sequences at a time (--max-num-seqs)"
    return (
        Row("/tokenize|/detokenize", (), larger(SIZE), f"more than {SIZE:,} characters and values",
            "stalls 0.32: 10 MB to /tokenize, 22 s; elsewhere it looks at the length first"),
        Row(".*", (), no_number, "a number that is NaN, infinite or beyond 64 bits", "0.32 answers 500"),
        Row("/generative_scoring|/v1/systemone|/v1/decisions", (), bool, "scoring ends a server that drafts",
            SCORES),
        Row(".*", ("logprob_token_ids",), bool, "they end a server that drafts", SCORES),
        Row(ANSWERS, (), more_than(sequences),
            f"expected a whole n, and no more than {sequences} answers (prompts times n) {at_once}",
            "stalls 0.32: n=100 with 4 sequences, more than 30 s"),
        Row("/v1/chat/completions/batch", ("messages",), over(sequences),
            f"expected no more than {sequences} chats {at_once}", "stalls 0.32: 2,000 chats, 28 s"),
        Row(".*", GRAMMARS, larger(GRAMMAR), f"a grammar of more than {GRAMMAR:,} characters",
            "stalls 0.32: compiled on all cores for tens of seconds, also after the client has gone"),
        Row(".*", (), forced, f"tools of more than {GRAMMAR:,} characters that must be called",
            "stalls 0.32: they are a grammar"),
        Row(".*", ("use_beam_search",), bool, "beam search reads the prompt anew for each token",
            "stalls 0.32 on a CPU: three beams of 1,500 tokens, 4 s"),
        Row(".*", ("allowed_token_ids", "logit_bias"), over(1024), "more than 1,024 of them", V2),
        Row(".*", ("stop_token_ids",), over(STOPS), f"more than {STOPS} of them", V2),
        Row(".*", ("bad_words",), wordy, f"more than {STOPS} of them, or {WORDS} bytes", V2),
    )  # fmt: skip


def refusal(table: tuple[Row, ...], path: str, body: dict[str, Any]) -> str | None:
    """Why vLLM shall not see this request, naming the field; None where it may. path: without the query."""
    bodies = [body, body.get("sampling_params")]  # of /inference/v1/generate
    asked = [part for part in bodies if isinstance(part, dict)]
    return next((reason for row in table for part in asked if (reason := row.meets(path, part))), None)


def whole(digits: str) -> int:
    if len(digits) > DIGITS:
        raise ValueError(f"an integer of more than {DIGITS} digits")
    return int(digits)


def fault(table: tuple[Row, ...], path: str, data: bytes) -> str | None:
    """What is wrong with a body; None for one that vLLM may see. It parses it with `json.loads`, too, so that both read
    the same. Text counts as JSON here: nothing is parsed before."""
    if sum(map(data.count, (b",", b"[", b"{"))) > VALUES:
        return f"expected JSON of at most {VALUES} values"
    try:
        body = json.loads(data, parse_int=whole)
    except (ValueError, RecursionError) as error:
        return f"expected JSON ({str(error)[:100]})"
    if not isinstance(body, dict):
        return "expected a JSON object"
    level: list[Any] = [body]
    for _ in range(DEPTH):
        inner = (item.values() if item.__class__ is dict else item for item in level)
        level = [value for some in inner for value in some if value.__class__ in CONTAINERS]
        if not level:
            return refusal(table, path, body)
    return f"expected JSON nested at most {DEPTH} deep"
