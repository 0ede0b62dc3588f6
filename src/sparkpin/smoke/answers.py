"""Answers of an OpenAI-compatible server, read strictly, and what they must be. Pure.

A message is put together from what the protocol promises: the schemas of cases.yaml. Each function that judges gives a
detail for the record, or raises Wrong with the reason.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from sparkpin.smoke.client import BadStream, Exchange, parse_chunks
from sparkpin.smoke.expectations import Case, table

MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<function=")
NOTHING = -9999.0  # what vLLM writes for a log-probability of minus infinity, which JSON lacks


class Wrong(Exception):
    """A check did not hold; the text says what was seen and what was wanted."""


class NotApplicable(Exception):
    """What is served cannot be asked this; the text says why. It goes into the record, and no silence."""


@dataclass(frozen=True)
class Answer:
    """A message put together, from one JSON object or from a stream's deltas."""

    content: str
    reasoning: str
    tool_calls: tuple[tuple[str, str], ...]
    finish: str
    tokens: int
    prompt: int = 0  # tokens of the prompt


def require(holds: bool, reason: str) -> None:
    if not holds:
        raise Wrong(reason)


def a_dict(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Wrong(f"{what}: got {value!r}, expected an object")
    return value


def json_of(reply: Exchange) -> dict[str, Any]:
    require(reply.status == 200, f"status {reply.status}: {reply.start}")
    try:
        value = json.loads(reply.body)
    except ValueError as error:
        raise Wrong(f"status 200, but no JSON ({error}): {reply.start}") from None
    return a_dict(value, "the answer")


def only_choice(value: dict[str, Any]) -> dict[str, Any]:
    choices = value.get("choices")
    if not isinstance(choices, list) or len(choices) != 1:
        raise Wrong(f"choices: got {choices!r}, expected a list of one")
    return a_dict(choices[0], "choices[0]")


def require_valid(value: Any, schema: dict[str, Any], what: str) -> None:
    if error := best_match(Draft202012Validator(schema).iter_errors(value)):
        raise Wrong(f"{what}: {error.json_path}: {error.message[:300]}")


def require_own_ids(ids: Sequence[str]) -> None:
    require(len(ids) == len(set(ids)), f"tool_calls: got the ids {ids}, expected one for each call")


def chat_answer(reply: Exchange) -> Answer:
    """Of a chat, or of a completion, which has no message."""
    value = json_of(reply)
    require_valid(value, table()["schemas"]["answer"], "the answer")
    choice = value["choices"][0]
    message = choice.get("message") or {"content": choice.get("text")}
    calls = message.get("tool_calls") or []
    require_own_ids([call["id"] for call in calls])
    found = tuple((call["function"]["name"], call["function"].get("arguments") or "") for call in calls)
    content, reasoning = message.get("content") or "", message.get("reasoning") or ""
    usage, finish = value["usage"], str(choice.get("finish_reason"))
    return Answer(content, reasoning, found, finish, usage["completion_tokens"], usage["prompt_tokens"])


def stream_answer(reply: Exchange) -> tuple[Answer, int]:
    """The answer and the number of deltas that carried a part of it."""
    require(reply.status == 200, f"status {reply.status}: {reply.start}")
    kind = reply.content_type.partition(";")[0]
    require(kind == "text/event-stream", f"content type {kind!r}, expected text/event-stream: {reply.start}")
    text, finish, parts, roles = {"content": "", "reasoning": ""}, "", 0, []
    calls, schemas = list[dict[str, str]](), table()["schemas"]
    usage = {"completion_tokens": 0, "prompt_tokens": 0}
    for chunk in parse_chunks(reply.body):
        require_valid(chunk, schemas["chunk"], "a chunk")
        if not chunk["choices"]:
            usage = chunk.get("usage", {})
            require_valid(usage, schemas["usage"], "usage")
            continue
        choice = chunk["choices"][0]
        require(not finish, f"a delta after finish_reason {finish!r}: {choice!r}")
        delta = choice["delta"]
        roles += [delta["role"]] if delta.get("role") else []
        for key in text:
            text[key] += delta.get(key) or ""
        for part in delta.get("tool_calls") or []:
            index, function = part["index"], part["function"]
            require(index <= len(calls), f"tool_calls: index {index} after {len(calls)} calls")
            which = "first-delta" if index == len(calls) else "later-delta"
            require_valid(part, schemas[which], f"tool_calls index {index}, {which}")
            if index == len(calls):
                calls.append({"id": part["id"], "name": function["name"], "arguments": ""})
            calls[index]["arguments"] += function.get("arguments") or ""
        parts += any(delta.get(key) for key in (*text, "tool_calls"))
        finish = choice.get("finish_reason") or ""
    require(roles == ["assistant"], f"roles in the deltas: got {roles}, expected 'assistant' once")
    require_own_ids([call["id"] for call in calls])
    found = tuple((call["name"], call["arguments"]) for call in calls)
    counts = usage["completion_tokens"], usage["prompt_tokens"]
    return Answer(text["content"], text["reasoning"], found, finish, *counts), parts


def speed_of(exchanges: Sequence[Exchange]) -> dict[str, float] | None:
    """What the streamed requests of a test saw, one at a time: the median of the seconds to the first token, and tokens
    a second after it. No benchmark: few of them, and short. None where no whole answer of several tokens was streamed.
    """
    first, tokens, seconds = list[float](), 0, 0.0
    for one in exchanges:
        if one.status == 200 and not one.fault and one.first and one.seconds > one.first:
            with contextlib.suppress(BadStream, Wrong):
                answer, _ = stream_answer(one)
                if answer.tokens > 1:
                    first.append(one.first)
                    tokens, seconds = tokens + answer.tokens - 1, seconds + one.seconds - one.first
    return {"first_token": round(median(first), 4), "tokens_a_second": round(tokens / seconds, 2)} if first else None


def compare(what: str, got: str, expected: str) -> None:
    if got == expected:
        return
    at = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), min(len(got), len(expected)))
    raise Wrong(f"{what} differs at character {at}: got {got[at : at + 60]!r}, expected {expected[at : at + 60]!r}")


def judge(case: Case, answer: Answer) -> str:
    return judge_calls(case, answer) if case.calls else judge_text(case, answer)


def judge_text(case: Case, answer: Answer) -> str:
    """Text that is exactly the expected one, or at least looks like text and holds what it must."""
    require(not answer.tool_calls, f"a tool call where text was expected: {answer.tool_calls}")
    if case.exact:
        compare("content", answer.content, case.content or "")
        compare("reasoning", answer.reasoning, case.reasoning or "")
    else:
        judge_shape(answer.content, case.least_tokens)
    wanted = ("stop",) if case.exact or case.ends else ("stop", "length")
    require(answer.finish in wanted, f"finish_reason: got {answer.finish!r}, expected {' or '.join(wanted)}")
    for text in case.holds:
        require(text in answer.content, f"content: got {answer.content[:120]!r}, expected {text!r} in it")
    require(answer.tokens >= case.least_tokens, f"{answer.tokens} tokens, expected at least {case.least_tokens}")
    return f"{answer.tokens} tokens{', exact' if case.exact else ''}"


def judge_shape(text: str, least_tokens: int) -> None:
    """Broken kernels answer with nothing, one character for ever, or undecodable bytes."""
    require(text.strip() != "", "the answer has no text")
    require("\ufffd" not in text, f"the answer holds bytes that are no text: {text[:80]!r}")
    require_no_markup(text)
    require(len(set(text)) > 1, f"one character only: {text[:80]!r}")
    words = text.split()
    varied = len(set(words)) > max(len(words) / 5, 10)
    require(varied or least_tokens <= 50, f"the text repeats itself: {text[:80]!r}")


def require_no_markup(content: str) -> None:
    for mark in MARKUP:
        require(mark not in content, f"{mark} was left in the content: {content[:120]!r}")


def judge_calls(case: Case, answer: Answer) -> str:
    """The calls that were wanted, in order, with arguments that fit their tool."""
    wanted = case.calls or ()
    if len(answer.tool_calls) != len(wanted):
        place = "".join(f"; {mark} stands in the reasoning" for mark in MARKUP if mark in answer.reasoning)
        found = f"got {len(answer.tool_calls)} tool calls, expected {len(wanted)}"
        raise Wrong(f"{found}; content {answer.content[:120]!r}{place}")
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in case.request["tools"]}
    values = list[Any]()
    for (name, text), (wanted_name, wanted_arguments) in zip(answer.tool_calls, wanted, strict=True):
        require(name == wanted_name, f"function.name: got {name!r}, expected {wanted_name!r}")
        try:
            arguments = json.loads(text)
        except ValueError as error:
            raise Wrong(f"the arguments are not JSON ({error}): {text[:200]!r}") from None
        require_valid(arguments, schemas[name] | {"additionalProperties": False}, f"arguments {text[:200]}")
        if wanted_arguments is not None:
            require(arguments == wanted_arguments, f"arguments: got {arguments!r}, expected {wanted_arguments!r}")
        values += arguments.values()
    if case.exact:
        compare("reasoning", answer.reasoning, case.reasoning or "")
    for part in case.holds:
        holds = any(isinstance(value, str) and part in value for value in values)
        require(holds, f"arguments: got {values!r}, expected {part!r} in one")
    require_no_markup(answer.content)
    require(answer.finish == "tool_calls", f"finish_reason: got {answer.finish!r}, expected 'tool_calls'")
    return ", ".join(f"{name}({text})" for name, text in answer.tool_calls)


def judge_logprobs(reply: Exchange) -> str:
    """Of a chat answer to a greedy request: every token has a finite log-probability, and none beats it."""
    tokens, choice = chat_answer(reply).tokens, only_choice(json_of(reply))
    require_valid(choice, table()["schemas"]["logprobs"], "the choice")
    content = choice["logprobs"]["content"]
    require(len(content) == tokens, f"logprobs.content: got {len(content)} entries, expected one for each of {tokens}")
    least = 0.0
    for place, entry in enumerate(content):
        chosen = logprob(entry["logprob"], place)
        others = [logprob(one["logprob"], place, top=True) for one in entry["top_logprobs"]]
        best, share = max(others), sum(math.exp(one) for one in others)
        require(chosen >= best - 1e-3, f"token {place}: {chosen:.3f} was chosen at temperature 0, {best:.3f} was there")
        require(share <= 1.01, f"token {place}: the likeliest add up to {share:.3f}, expected 1 at most")
        least = min(least, chosen)
    return f"{tokens} tokens, the least likely {round(least, 3) + 0.0:.3f}"


def logprob(value: float, place: int, *, top: bool = False) -> float:
    """NaN and Infinity are no JSON, but Python's parser takes them. Only a token that was not chosen may have none."""
    finite = math.isfinite(value) and value <= 1e-6
    require(finite, f"token {place}: log-probability {value!r}, expected a finite one, 0 at most")
    require(top or value > NOTHING, f"token {place}: log-probability {value!r} stands for minus infinity")
    return value


def judge_same(what: str, answers: Sequence[Answer]) -> str:
    """Byte for byte, with the reasoning and the calls."""
    first = answers[0]
    for number, other in enumerate(answers[1:], start=2):
        compare(f"content of answer {number} ({what})", other.content, first.content)
        compare(f"reasoning of answer {number} ({what})", other.reasoning, first.reasoning)
        require(other == first, f"answer {number} ({what}): got {other}, expected {first}")
    return f"{len(answers)} times the same {first.tokens} tokens"
