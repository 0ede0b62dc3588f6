"""Answers of an OpenAI-compatible server, read strictly: a message is put together from what the protocol promises."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from sparkpin.smoke.replies import Exchange, Reply
from sparkpin.smoke.sse import BadStream, parse_chunks


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


def text_of(value: Any, what: str) -> str:
    """A string, or "" for null and absence."""
    if value is not None and not isinstance(value, str):
        raise Wrong(f"{what}: got {value!r}, expected a string")
    return value or ""


def json_of(reply: Reply) -> dict[str, Any]:
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


def tokens_of(value: dict[str, Any], key: str = "completion_tokens") -> int:
    tokens = a_dict(value.get("usage"), "usage").get(key)
    if not isinstance(tokens, int):
        raise Wrong(f"usage.{key}: got {tokens!r}, expected a number")
    return tokens


def require_own_ids(ids: list[Any]) -> None:
    require(len(ids) == len(set(ids)), f"tool_calls: got the ids {ids}, expected one for each call")


def reasoning_of(message: dict[str, Any]) -> str:
    return text_of(message.get("reasoning"), "reasoning")


def chat_answer(reply: Reply) -> Answer:
    value = json_of(reply)
    choice = only_choice(value)
    message = a_dict(choice.get("message"), "message")
    require(message.get("role") == "assistant", f"message.role: got {message.get('role')!r}, expected 'assistant'")
    calls, ids = [], []
    for number, call in enumerate(message.get("tool_calls") or []):
        function = a_dict(a_dict(call, f"tool_calls[{number}]").get("function"), f"tool_calls[{number}].function")
        require(bool(text_of(call.get("id"), "id")), f"tool_calls[{number}].id: got {call.get('id')!r}, expected text")
        calls.append((text_of(function.get("name"), "name"), text_of(function.get("arguments"), "arguments")))
        ids.append(call["id"])
    require_own_ids(ids)
    return Answer(
        content=text_of(message.get("content"), "content"),
        reasoning=reasoning_of(message),
        tool_calls=tuple(calls),
        finish=str(choice.get("finish_reason")),
        tokens=tokens_of(value),
        prompt=tokens_of(value, "prompt_tokens"),
    )


class Call:
    """A tool call as a strict client puts it together: id and name once, in the first delta of its index."""

    def __init__(self, index: int, delta: dict[str, Any]) -> None:
        self.where = f"tool_calls index {index}"
        name, identity = a_dict(delta.get("function"), f"{self.where}: function").get("name"), delta.get("id")
        require(isinstance(name, str) and name != "", f"{self.where}: first delta has name {name!r}, expected a string")
        require(
            isinstance(identity, str) and identity != "", f"{self.where}: first delta has id {identity!r}, expected one"
        )
        require(delta.get("type") == "function", f"{self.where}: first delta has type {delta.get('type')!r}")
        self.name, self.identity, self.arguments = str(name), identity, ""

    def add(self, delta: dict[str, Any], *, first: bool) -> None:
        function = a_dict(delta.get("function") or {}, f"{self.where}: function")
        if not first:
            for key, value in (("name", function.get("name")), ("id", delta.get("id"))):
                require(value is None, f"{self.where}: {key} {value!r} again in a later delta, expected it once")
        self.arguments += text_of(function.get("arguments"), f"{self.where}: arguments")


def stream_answer(reply: Reply) -> tuple[Answer, int]:
    """The answer and the number of deltas that carried a part of it."""
    require(reply.status == 200, f"status {reply.status}: {reply.start}")
    kind = reply.content_type.partition(";")[0]
    require(kind == "text/event-stream", f"content type {kind!r}, expected text/event-stream: {reply.start}")
    content = reasoning = finish = ""
    calls: dict[int, Call] = {}
    parts = tokens = prompt = 0
    roles = []
    for chunk in parse_chunks(reply.body):
        if chunk.get("usage") and not chunk.get("choices"):
            tokens, prompt = tokens_of(chunk), tokens_of(chunk, "prompt_tokens")
            continue
        choice = only_choice(chunk)
        require(not finish, f"a delta after finish_reason {finish!r}: {choice!r}")
        delta = a_dict(choice.get("delta"), "delta")
        roles += [delta["role"]] if delta.get("role") else []
        before = (content, reasoning)
        content += text_of(delta.get("content"), "delta.content")
        reasoning += reasoning_of(delta)
        for part in delta.get("tool_calls") or []:
            index = a_dict(part, "tool_calls").get("index")
            if not isinstance(index, int):
                raise Wrong(f"tool_calls: got index {index!r}, expected a number")
            if first := index not in calls:
                require(index == len(calls), f"tool_calls: index {index} after {len(calls)} calls")
                calls[index] = Call(index, part)
            calls[index].add(part, first=first)
        parts += before != (content, reasoning) or bool(delta.get("tool_calls"))
        finish = text_of(choice.get("finish_reason"), "finish_reason")
    require(roles == ["assistant"], f"roles in the deltas: got {roles}, expected 'assistant' once")
    require_own_ids([call.identity for call in calls.values()])
    found = tuple((call.name, call.arguments) for call in calls.values())
    return Answer(content, reasoning, found, finish, tokens, prompt), parts


@dataclass(frozen=True)
class RequestSpeed:
    """What the streamed requests of a test saw, one at a time. No benchmark: few of them, and short."""

    first_token: float  # seconds, the median
    tokens_a_second: float  # after the first token, of all of them together


def speed_of(exchanges: Sequence[Exchange]) -> RequestSpeed | None:
    """None where no whole answer of several tokens was streamed."""
    first, tokens, seconds = list[float](), 0, 0.0
    for one in exchanges:
        if one.status != 200 or one.fault or one.first is None or not (one.request or {}).get("stream"):
            continue
        with contextlib.suppress(BadStream, Wrong):
            count = max((tokens_of(chunk) for chunk in parse_chunks(one.body) if chunk.get("usage")), default=0)
            if count > 1 and one.seconds > one.first:
                first.append(one.first)
                tokens, seconds = tokens + count - 1, seconds + one.seconds - one.first
    return RequestSpeed(round(median(first), 4), round(tokens / seconds, 2)) if first else None
