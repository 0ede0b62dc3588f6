"""Requests that are refused before vLLM sees them: each ends its engine, or keeps other clients waiting for seconds.

Standard library alone: this file runs with the Python of an image, too. tests/adversary holds every row against a real
server. No agent comes near a limit.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from sparkpin.serve.rules import Limits

SIZE = 1_500_000  # characters and values: more than 262,144 tokens of code have
SEQUENCES = 3  # one less than the fewest that a recipe for several users serves at a time
GRAMMAR = 65_536  # characters and values; xgrammar's time grows with them
STOPS = 120  # 128 with the model's own ends
WORDS = 512  # bytes; each word is tokenized twice, into 1,024 tokens in all at most, none of less than a byte
INTEGERS = range(-(2**63), 2**64)  # of the message to the engine; anything else is answered 500


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
    """Each value and key in it, itself first; without recursion, which JSON of many levels would end."""
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


def many(body: Any) -> bool:
    """More sequences than SEQUENCES: prompts times answers. vLLM takes "100" and 100.0 for a number, too."""
    prompts, answers = body.get("prompt"), body.get("n")
    if answers is not None and type(answers) is not int:
        return True
    count = len(prompts) if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int) else 1
    return count * (1 if answers is None else answers) > SEQUENCES


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
REFUSED = (
    Row("/tokenize|/detokenize", (), larger(SIZE), f"more than {SIZE:,} characters and values",
        "stalls 0.32: 10 MB to /tokenize, 22 s; elsewhere it looks at the length first"),
    Row(".*", (), no_number, "a number that is NaN, infinite or beyond 64 bits", "0.32 answers 500"),
    Row("/generative_scoring|/v1/systemone|/v1/decisions", (), bool, "scoring ends a server that drafts",
        SCORES),
    Row(".*", ("logprob_token_ids",), bool, "they end a server that drafts", SCORES),
    Row(ANSWERS, (), many, f"more than {SEQUENCES} answers at once (prompts times n), or an n that is no whole number",
        "stalls 0.32: n=100 holds every sequence, more than 30 s"),
    Row("/v1/chat/completions/batch", ("messages",), over(SEQUENCES), f"more than {SEQUENCES} chats at once",
        "stalls 0.32: 2,000 chats, 28 s"),
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


def refusal(path: str, body: dict[str, Any]) -> str | None:
    """Why vLLM shall not see this request, naming the field; None where it may.

    path: without the query. body: parsed by `json.loads`, which itself raises RecursionError for JSON of a thousand
    levels, and ValueError for an integer of more than 4,300 digits: both are to be refused as broken JSON is.
    """
    bodies = [body, body.get("sampling_params")]  # of /inference/v1/generate
    asked = [part for part in bodies if isinstance(part, dict)]
    return next((reason for row in REFUSED for part in asked if (reason := row.meets(path, part))), None)


def fault(limits: Limits, path: str, data: bytes) -> str | None:
    """What is wrong with a body; None for one that may be passed on. Text counts too: JSON is not read before."""
    if sum(map(data.count, (b",", b"[", b"{"))) > limits.items:
        return f"expected JSON of at most {limits.items} values"
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        return f"expected JSON ({str(error)[:100]})"
    if not isinstance(body, dict):
        return "expected a JSON object"
    level: list[Any] = [body]
    for _ in range(limits.depth):
        inner = (item.values() if isinstance(item, dict) else item for item in level)
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
        if not level:
            return refusal(path, body)
    return f"expected JSON nested at most {limits.depth} deep"
