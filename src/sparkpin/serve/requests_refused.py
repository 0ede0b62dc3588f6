"""Requests that are refused before vLLM sees them: each ends its engine, or keeps other clients waiting for seconds.

Standard library alone: this file runs with the Python of an image, too. tests/adversary holds every row against a real
server. No agent comes near a limit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

DEPTH = 64
SIZE = 1_500_000  # characters and values, a picture's bytes aside: more than fits into 262,144 tokens of code
SEQUENCES = 3  # one less than the fewest that a recipe for several users serves at a time
GRAMMAR = 65_536  # characters; xgrammar's time grows with them
REPEATS = 10_000  # of one thing in a regular expression: two nested {1,99}
INTEGERS = range(-(2**63), 2**64)  # of the message to the engine; anything else is answered 500


@dataclass(frozen=True)
class Row:
    """path: a regular expression that the path must match as a whole. field: that of the body, None for all of it.

    condition: whether the value (or the body) is refused. Only values that are there are asked. kills: what vLLM of a
    release does otherwise.
    """

    path: str
    field: str | None
    condition: Callable[[Any], bool]
    reason: str
    kills: str


def values(value: Any) -> Iterator[tuple[Any, int]]:
    """Each value and key in it with its depth, itself first. It does not recurse: depth is what it is asked for."""
    left = [(value, 0)]
    while left:
        value, depth = left.pop()
        yield value, depth
        if isinstance(value, dict):
            left += [(part, depth + 1) for pair in value.items() for part in pair]
        elif isinstance(value, list):
            left += [(part, depth + 1) for part in value]


def deep(body: Any) -> bool:
    return any(depth > DEPTH for _, depth in values(body))


def large(body: Any) -> bool:
    def weight(value: Any) -> int:
        return len(value) if isinstance(value, str) and not value.startswith("data:") else 1

    return sum(weight(value) for value, _ in values(body)) > SIZE


def no_number(body: Any) -> bool:
    """NaN, an infinity, or an integer that the engine cannot be sent."""
    return any(
        (isinstance(value, float) and (value != value or abs(value) == float("inf")))
        or (isinstance(value, int) and value not in INTEGERS)
        for value, _ in values(body)
    )


def many(body: Any) -> bool:
    """More sequences than SEQUENCES: prompts times answers."""
    prompts, answers = body.get("prompt"), body.get("n")
    count = len(prompts) if isinstance(prompts, list) and not isinstance(prompts[:1], int) else 1
    return count * (answers if isinstance(answers, int) else 1) > SEQUENCES


def over(limit: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list | dict) and len(value) > limit


def long(value: Any) -> bool:
    return len(json.dumps(value)) > GRAMMAR


def repeats(regex: str) -> int:
    """The most copies of one thing that the nested {m,n} of a regular expression ask for."""
    groups, last = [1], 1
    for escape, bounds, character in re.findall(r"(\\.|\[(?:\\.|[^\]])*\])|\{(\d+(?:,\d*)?)\}|(.)", regex, re.DOTALL):
        if bounds:
            last *= max(int(bound or 1) for bound in bounds.split(","))
            groups[-1] = max(groups[-1], last)
        elif character == "(":
            groups.append(1)
        elif character == ")" and len(groups) > 1:
            last = groups.pop()
            groups[-1] = max(groups[-1], last)
        elif escape or character not in "*+?":
            last = 1
    return max(groups)


def repeating(value: Any) -> bool:
    """Whether a grammar holds such a regular expression, as `regex` or as a schema's `pattern`."""
    found = [
        part[key]
        for part, _ in values(value)
        if isinstance(part, dict)
        for key in ("regex", "pattern")
        if isinstance(part.get(key), str)
    ]
    return any(repeats(regex) > REPEATS for regex in found)


GRAMMARS = ("response_format", "structured_outputs", "text", "output_format", "output_config")
REFUSED = (
    Row(".*", None, deep, f"JSON of more than {DEPTH} levels", "0.32 answers, and each layer behind it recurses"),
    Row(".*", None, large, f"more than {SIZE:,} characters and values", "stalls 0.32: 10 MB to /tokenize, 22 s"),
    Row(".*", None, no_number, "a number that is NaN, infinite or beyond 64 bits", "0.32 answers 500"),
    Row("/generative_scoring|/v1/systemone", None, lambda body: True, "scoring ends a server that drafts",
        "0.32: vllm-project/vllm#42592, open"),
    Row(".*", "logprob_token_ids", bool, "log-probabilities of chosen tokens end a server that drafts",
        "0.32: vllm-project/vllm#42592, open"),
    Row("/v1/completions|/v1/chat/completions|/invocations", None, many, f"more than {SEQUENCES} answers at once",
        "stalls 0.32: n=100 holds all its sequences for minutes"),
    Row("/v1/chat/completions/batch", "messages", over(SEQUENCES), f"more than {SEQUENCES} chats at once",
        "stalls 0.32: 2,000 chats, 28 s"),
    *(Row(".*", field, long, f"a grammar of more than {GRAMMAR:,} characters",
          "stalls 0.32: xgrammar compiles on all cores, and goes on after the client went") for field in GRAMMARS),
    *(Row(".*", field, repeating, f"a regular expression that repeats something more than {REPEATS:,} times",
          "stalls 0.32: compiled on all cores for more than 30 s") for field in GRAMMARS),
    *(Row(".*", field, over(limit), f"more than {limit:,} of them", "0.32 on GPUs, as is read in its V2 model runner")
      for field, limit in (("allowed_token_ids", 1024), ("logit_bias", 1024), ("stop_token_ids", 128),
                           ("bad_words", 128))),
)  # fmt: skip


def refusal(path: str, body: dict[str, Any]) -> str | None:
    """Why vLLM shall not see this request, naming the field; None where it may.

    path: without the query. body: parsed by `json.loads`, which itself raises RecursionError for JSON of a thousand
    levels, and ValueError for an integer of more than 4,300 digits: such bodies are to be refused as broken JSON is.
    """
    for row in REFUSED:
        value = body if row.field is None else body.get(row.field)
        if value is not None and re.fullmatch(row.path, path) and row.condition(value):
            return f"{row.field}: {row.reason}" if row.field else row.reason
    return None
