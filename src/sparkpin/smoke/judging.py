"""What an answer must be. Pure: each function gives a detail for the record, or raises Wrong with the reason."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from sparkpin.smoke.answers import Answer, Wrong, a_dict, only_choice, require
from sparkpin.smoke.expectations import Case

MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<function=")
NOTHING = -9999.0  # what vLLM writes for a log-probability of minus infinity, which JSON lacks
KINDS: Mapping[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
}


def compare(what: str, seen: str, wanted: str) -> None:
    if seen == wanted:
        return
    at = next((i for i, (a, b) in enumerate(zip(seen, wanted, strict=False)) if a != b), min(len(seen), len(wanted)))
    raise Wrong(f"{what} differs at character {at}: got {seen[at : at + 60]!r}, expected {wanted[at : at + 60]!r}")


def judge_text(case: Case, answer: Answer) -> str:
    """Text that is exactly the expected one, or at least looks like text and holds what it must."""
    require(not answer.tool_calls, f"a tool call where text was expected: {answer.tool_calls}")
    if case.exact:
        compare("content", answer.content, case.content or "")
        compare("reasoning", answer.reasoning, case.reasoning or "")
        require(answer.finish == "stop", f"finish_reason: got {answer.finish!r}, expected 'stop'")
    else:
        judge_shape(answer.content, case.least_tokens)
        wanted = ("stop",) if case.ends else ("stop", "length")
        require(answer.finish in wanted, f"finish_reason: got {answer.finish!r}, expected {' or '.join(wanted)}")
    for text in case.holds:
        require(text in answer.content, f"content: got {answer.content[:120]!r}, expected {text!r} in it")
    require(answer.tokens >= case.least_tokens, f"{answer.tokens} tokens, expected at least {case.least_tokens}")
    return f"{answer.tokens} tokens{', exact' if case.exact else ''}"


def judge(case: Case, answer: Answer) -> str:
    return judge_calls(case, answer) if case.calls else judge_text(case, answer)


def judge_shape(text: str, least_tokens: int) -> None:
    """Broken kernels answer with nothing, one character for ever, or undecodable bytes."""
    require(text.strip() != "", "the answer has no text")
    require("\ufffd" not in text, f"the answer holds bytes that are no text: {text[:80]!r}")
    for mark in MARKUP:
        require(mark not in text, f"{mark} was left in the content")
    words = text.split()
    if least_tokens > 50:
        require(len(set(words)) > len(words) / 5 and len(set(words)) > 10, f"the text repeats itself: {text[:80]!r}")
    else:
        require(len(set(text)) > 1, f"one character only: {text[:80]!r}")


def judge_calls(case: Case, answer: Answer) -> str:
    """The calls that were wanted, in order, with arguments that fit their tool."""
    wanted = case.calls or ()
    if len(answer.tool_calls) != len(wanted):
        lost = next((mark for mark in MARKUP if mark in answer.reasoning), "")
        place = f"; {lost} stands in the reasoning" if lost else ""
        plural = "s" if len(wanted) != 1 else ""
        raise Wrong(
            f"got {len(answer.tool_calls)} tool calls, expected {len(wanted)} call{plural}; "
            f"content {answer.content[:120]!r}{place}"
        )
    said = []
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in case.request["tools"]}
    for (name, text), (wanted_name, wanted_arguments) in zip(answer.tool_calls, wanted, strict=True):
        require(name == wanted_name, f"function.name: got {name!r}, expected {wanted_name!r}")
        arguments = arguments_of(text)
        if wanted_arguments is not None:
            require(arguments == wanted_arguments, f"arguments: got {arguments!r}, expected {wanted_arguments!r}")
        judge_arguments(arguments, schemas[name])
        said.append(f"{name}({text})")
    if case.exact:
        compare("reasoning", answer.reasoning, case.reasoning or "")
    values = [value for _, text in answer.tool_calls for value in arguments_of(text).values()]
    for part in case.holds:
        require(
            any(isinstance(v, str) and part in v for v in values),
            f"arguments: got {values!r}, expected {part!r} in one",
        )
    for mark in MARKUP:
        require(mark not in answer.content, f"{mark} was left in the content: {answer.content[:120]!r}")
    require(answer.finish == "tool_calls", f"finish_reason: got {answer.finish!r}, expected 'tool_calls'")
    return ", ".join(said)


def arguments_of(text: str) -> dict[str, Any]:
    try:
        return a_dict(json.loads(text), "arguments")
    except ValueError as error:
        raise Wrong(f"the arguments are not JSON ({error}): {text[:200]!r}") from None


def judge_arguments(arguments: dict[str, Any], schema: dict[str, Any]) -> None:
    """As far as the tools offered here use JSON Schema: properties with a type or an enum, all of them known."""
    missing = [name for name in schema["required"] if arguments.get(name) in (None, "")]
    require(not missing, f"arguments {arguments!r} lack {missing}")
    unknown = [name for name in arguments if name not in schema["properties"]]
    require(not unknown, f"arguments {arguments!r} have unknown names {unknown}")
    for name, value in arguments.items():
        wanted = schema["properties"][name]
        kind = wanted["type"]
        fits = isinstance(value, KINDS[kind]) and (kind == "boolean" or not isinstance(value, bool))
        require(fits, f"argument {name}: got {value!r}, expected {kind}")
        choices = wanted.get("enum")
        require(not choices or value in choices, f"argument {name}: got {value!r}, expected one of {choices}")


def judge_logprobs(value: dict[str, Any], tokens: int) -> str:
    """Of a chat answer to a greedy request: every token has a finite log-probability, and none beats it."""
    content = a_dict(only_choice(value).get("logprobs"), "logprobs").get("content")
    if not isinstance(content, list) or not content:
        raise Wrong(f"logprobs.content: got {content!r}, expected a list")
    require(len(content) == tokens, f"logprobs.content: got {len(content)} entries, expected one for each of {tokens}")
    least = 0.0
    for place, entry in enumerate(content):
        chosen = logprob(a_dict(entry, f"logprobs.content[{place}]"), place)
        others = [logprob(a_dict(one, f"top_logprobs of {place}"), place, top=True) for one in entry["top_logprobs"]]
        require(bool(others), f"token {place}: no top_logprobs")
        best = max(others)
        require(chosen >= best - 1e-3, f"token {place}: {chosen:.3f} was chosen at temperature 0, {best:.3f} was there")
        share = sum(math.exp(one) for one in others)
        require(share <= 1.01, f"token {place}: the likeliest add up to {share:.3f}, expected 1 at most")
        least = min(least, chosen)
    return f"{tokens} tokens, the least likely {round(least, 3) + 0.0:.3f}"


def logprob(entry: dict[str, Any], place: int, *, top: bool = False) -> float:
    """NaN and Infinity are no JSON, but Python's parser takes them. Only a token that was not chosen may have none."""
    value = entry.get("logprob")
    if not isinstance(value, int | float) or not math.isfinite(value) or value > 1e-6:
        raise Wrong(f"token {place}: log-probability {value!r}, expected a finite one, 0 at most")
    require(top or value > NOTHING, f"token {place}: log-probability {value!r} stands for minus infinity")
    return float(value)


def judge_same(what: str, answers: Sequence[Answer]) -> str:
    """Byte for byte, the reasoning and the calls, too."""
    first = answers[0]
    for number, other in enumerate(answers[1:], start=2):
        compare(f"content of answer {number} ({what})", other.content, first.content)
        compare(f"reasoning of answer {number} ({what})", other.reasoning, first.reasoning)
        require(other.tool_calls == first.tool_calls, f"answer {number} ({what}): other tool calls than answer 1")
        require(other.tokens == first.tokens, f"answer {number}: {other.tokens} tokens, answer 1: {first.tokens}")
    return f"{len(answers)} times the same {first.tokens} tokens"
