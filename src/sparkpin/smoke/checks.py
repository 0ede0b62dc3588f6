"""The checks that a stage names under `smoke.checks`. Each asks a server something and raises Wrong with a reason."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sparkpin.errors import ManifestError
from sparkpin.manifests import Stage
from sparkpin.smoke import metrics, mods
from sparkpin.smoke.client import Client, Fault, Reply
from sparkpin.smoke.expectations import Case, Expectations
from sparkpin.smoke.sse import BadStream, parse_chunks

LEAST_DRAFTED = 50  # fewer drafted tokens say too little about a share
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<function=")


class Wrong(Exception):
    """A check did not hold; the text says what was seen and what was wanted."""


@dataclass(frozen=True)
class Subject:
    """A server that runs, and what is known about it.

    log: everything it has logged so far. mods: those that must be active. floor: least share
    of drafted tokens that must be accepted.
    """

    client: Client
    model: str
    expect: Expectations
    log: Callable[[], bytes]
    mods: frozenset[str] = frozenset()
    floor: float | None = None


@dataclass(frozen=True)
class CheckResult:
    name: str
    passed: bool
    detail: str
    seconds: float


Check = Callable[[Subject], str]


@dataclass(frozen=True)
class Answer:
    """A message put together, from one JSON object or from a stream's deltas."""

    content: str
    reasoning: str
    tool_calls: tuple[tuple[str, str], ...]
    finish: str
    tokens: int


def require(holds: bool, reason: str) -> None:
    if not holds:
        raise Wrong(reason)


def a_dict(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Wrong(f"{what}: saw {value!r}, wanted an object")
    return value


def text_of(value: Any, what: str) -> str:
    """A string, or "" for null and absence."""
    if value is not None and not isinstance(value, str):
        raise Wrong(f"{what}: saw {value!r}, wanted a string")
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
        raise Wrong(f"choices: saw {choices!r}, wanted a list of one")
    return a_dict(choices[0], "choices[0]")


def tokens_of(value: dict[str, Any]) -> int:
    tokens = a_dict(value.get("usage"), "usage").get("completion_tokens")
    if not isinstance(tokens, int):
        raise Wrong(f"usage.completion_tokens: saw {tokens!r}, wanted a number")
    return tokens


def reasoning_of(message: dict[str, Any]) -> str:
    """vLLM says `reasoning`, before 0.12 `reasoning_content`."""
    return text_of(message.get("reasoning") or message.get("reasoning_content"), "reasoning")


def chat_answer(reply: Reply) -> Answer:
    value = json_of(reply)
    choice = only_choice(value)
    message = a_dict(choice.get("message"), "message")
    require(message.get("role") == "assistant", f"message.role: saw {message.get('role')!r}, wanted 'assistant'")
    calls = []
    for number, call in enumerate(message.get("tool_calls") or []):
        function = a_dict(a_dict(call, f"tool_calls[{number}]").get("function"), f"tool_calls[{number}].function")
        require(bool(text_of(call.get("id"), "id")), f"tool_calls[{number}].id: saw {call.get('id')!r}, wanted a name")
        calls.append((text_of(function.get("name"), "name"), text_of(function.get("arguments"), "arguments")))
    content = text_of(message.get("content"), "content")
    return Answer(content, reasoning_of(message), tuple(calls), str(choice.get("finish_reason")), tokens_of(value))


class Call:
    """A tool call as a strict client puts it together: id and name once, in the first delta of its index."""

    def __init__(self, index: int, delta: dict[str, Any]) -> None:
        self.where = f"tool_calls index {index}"
        name, identity = a_dict(delta.get("function"), f"{self.where}: function").get("name"), delta.get("id")
        require(isinstance(name, str) and name != "", f"{self.where}: first delta has name {name!r}, wanted a string")
        require(
            isinstance(identity, str) and identity != "", f"{self.where}: first delta has id {identity!r}, wanted one"
        )
        require(delta.get("type") == "function", f"{self.where}: first delta has type {delta.get('type')!r}")
        self.name, self.arguments = str(name), ""

    def add(self, delta: dict[str, Any], *, first: bool) -> None:
        function = a_dict(delta.get("function") or {}, f"{self.where}: function")
        if not first:
            for key, value in (("name", function.get("name")), ("id", delta.get("id"))):
                require(value is None, f"{self.where}: {key} {value!r} again in a later delta, wanted it once")
        self.arguments += text_of(function.get("arguments"), f"{self.where}: arguments")


def stream_answer(reply: Reply) -> tuple[Answer, int]:
    """The answer and the number of deltas that carried a part of it."""
    require(reply.status == 200, f"status {reply.status}: {reply.start}")
    kind = reply.content_type.partition(";")[0]
    require(kind == "text/event-stream", f"content type {kind!r}, wanted text/event-stream: {reply.start}")
    content = reasoning = finish = ""
    calls: dict[int, Call] = {}
    parts = tokens = 0
    roles = []
    for chunk in parse_chunks(reply.body):
        if chunk.get("usage") and not chunk.get("choices"):
            tokens = tokens_of(chunk)
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
                raise Wrong(f"tool_calls: saw index {index!r}, wanted a number")
            if first := index not in calls:
                require(index == len(calls), f"tool_calls: index {index} after {len(calls)} calls")
                calls[index] = Call(index, part)
            calls[index].add(part, first=first)
        parts += before != (content, reasoning) or bool(delta.get("tool_calls"))
        finish = text_of(choice.get("finish_reason"), "finish_reason")
    require(roles == ["assistant"], f"roles in the deltas: saw {roles}, wanted 'assistant' once")
    found = tuple((call.name, call.arguments) for call in calls.values())
    return Answer(content, reasoning, found, finish, tokens), parts


def compare(what: str, seen: str, wanted: str) -> None:
    if seen == wanted:
        return
    at = next((i for i, (a, b) in enumerate(zip(seen, wanted, strict=False)) if a != b), min(len(seen), len(wanted)))
    raise Wrong(f"{what} differs at character {at}: saw {seen[at : at + 60]!r}, wanted {wanted[at : at + 60]!r}")


def judge_text(case: Case, answer: Answer) -> str:
    """Text that is exactly the expected one, or at least looks like text."""
    require(not answer.tool_calls, f"a tool call where text was wanted: {answer.tool_calls}")
    if case.exact:
        compare("content", answer.content, case.content or "")
        compare("reasoning", answer.reasoning, case.reasoning or "")
        require(answer.finish == "stop", f"finish_reason: saw {answer.finish!r}, wanted 'stop'")
    else:
        judge_shape(answer.content, case.least_tokens)
        require(answer.finish in ("stop", "length"), f"finish_reason: saw {answer.finish!r}, wanted 'stop' or 'length'")
    require(answer.tokens >= case.least_tokens, f"{answer.tokens} tokens, wanted at least {case.least_tokens}")
    return f"{answer.tokens} tokens{', exact' if case.exact else ''}"


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


def judge_call(case: Case, answer: Answer) -> str:
    require(
        len(answer.tool_calls) == 1,
        f"saw {len(answer.tool_calls)} tool calls, wanted 1; content {answer.content[:120]!r}",
    )
    name, text = answer.tool_calls[0]
    require(name == case.tool_name, f"function.name: saw {name!r}, wanted {case.tool_name!r}")
    try:
        arguments = json.loads(text)
    except ValueError as error:
        raise Wrong(f"the arguments are not JSON ({error}): {text[:200]!r}") from None
    if case.arguments is not None:
        require(arguments == case.arguments, f"arguments: saw {arguments!r}, wanted {case.arguments!r}")
        compare("reasoning", answer.reasoning, case.reasoning or "")
    else:
        judge_arguments(a_dict(arguments, "arguments"), case.request["tools"][0]["function"]["parameters"])
    for mark in MARKUP:
        require(mark not in answer.content, f"{mark} was left in the content: {answer.content[:120]!r}")
    require(answer.finish == "tool_calls", f"finish_reason: saw {answer.finish!r}, wanted 'tool_calls'")
    return f"{name}({text})"


def judge_arguments(arguments: dict[str, Any], schema: dict[str, Any]) -> None:
    missing = [name for name in schema["required"] if not isinstance(arguments.get(name), str) or not arguments[name]]
    require(not missing, f"arguments {arguments!r} lack {missing}")
    unknown = [name for name in arguments if name not in schema["properties"]]
    require(not unknown, f"arguments {arguments!r} have unknown names {unknown}")


def chat(subject: Subject, case: Case) -> Answer:
    return chat_answer(subject.client.post("/v1/chat/completions", {"model": subject.model, **case.request}))


def streamed(subject: Subject, case: Case) -> tuple[Answer, int]:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    answer, parts = stream_answer(
        subject.client.post("/v1/chat/completions", {"model": subject.model, **case.request, **options})
    )
    require(parts > 1, f"the stream came in {parts} part(s), wanted several")
    return answer, parts


def completion(subject: Subject) -> str:
    case = subject.expect.completion
    value = json_of(subject.client.post("/v1/completions", {"model": subject.model, **case.request}))
    choice = only_choice(value)
    text = text_of(choice.get("text"), "text")
    return judge_text(case, Answer(text, "", (), str(choice.get("finish_reason")), tokens_of(value)))


def plain_chat(subject: Subject) -> str:
    return judge_text(subject.expect.chat, chat(subject, subject.expect.chat))


def chat_stream(subject: Subject) -> str:
    answer, parts = streamed(subject, subject.expect.chat)
    return f"{judge_text(subject.expect.chat, answer)}, in {parts} parts"


def tool_call(subject: Subject) -> str:
    return judge_call(subject.expect.tool_call, chat(subject, subject.expect.tool_call))


def tool_call_stream(subject: Subject) -> str:
    answer, parts = streamed(subject, subject.expect.tool_call)
    return f"{judge_call(subject.expect.tool_call, answer)}, in {parts} parts"


def tool_answer(subject: Subject) -> str:
    answer, parts = streamed(subject, subject.expect.tool_answer)
    return f"{judge_text(subject.expect.tool_answer, answer)}, in {parts} parts"


def long_text(subject: Subject) -> str:
    return judge_text(subject.expect.long_text, chat(subject, subject.expect.long_text))


def active_mods(subject: Subject) -> str:
    seen = mods.reports(subject.log())
    faults = mods.faults(seen, subject.mods)
    require(not faults, "; ".join(faults))
    return ", ".join(sorted(mods.active(seen))) or "none wanted, none active"


def acceptance(subject: Subject) -> str:
    reply = subject.client.get("/metrics")
    require(reply.status == 200, f"/metrics: status {reply.status}: {reply.start}")
    seen = metrics.acceptance(reply.body.decode(errors="replace"))
    if seen is None:
        raise Wrong(f"/metrics has no {metrics.DRAFTED}: the server does not draft")
    require(seen.drafted > 0, "no token was drafted")
    require(seen.drafted >= LEAST_DRAFTED, f"{seen.drafted} drafted tokens are too few to judge (add long-text)")
    require(subject.floor is not None and seen.share >= subject.floor, f"{seen}, wanted at least {subject.floor}")
    return str(seen)


CHECKS: dict[str, Check] = {
    "completion": completion,
    "chat": plain_chat,
    "chat-stream": chat_stream,
    "tool-call": tool_call,
    "tool-call-stream": tool_call_stream,
    "tool-answer": tool_answer,
    "long-text": long_text,
    "mods": active_mods,
    "acceptance": acceptance,
}
READERS = ("mods", "acceptance")  # they read what the others have left in log and metrics, so they come last


def checks_of(stage: Stage) -> tuple[str, ...]:
    """The stage's checks in the order in which they run. An unknown name is a ManifestError."""
    file = f"stages/{stage.name}.yaml"
    for name in stage.smoke.checks:
        if name not in CHECKS:
            raise ManifestError(file, "smoke.checks", name, f"one of {', '.join(CHECKS)}")
    if "acceptance" in stage.smoke.checks and stage.smoke.acceptance_floor is None:
        raise ManifestError(file, "smoke.acceptance_floor", None, "a share from 0 to 1 for the check acceptance")
    return tuple(sorted(stage.smoke.checks, key=lambda name: name in READERS))


def run_check(name: str, subject: Subject) -> CheckResult:
    """Whatever the server does wrong is a result, not an exception."""
    start = time.monotonic()
    try:
        detail, passed = CHECKS[name](subject), True
    except (Wrong, Fault, BadStream) as error:
        detail, passed = str(error), False
    return CheckResult(name, passed, detail, round(time.monotonic() - start, 2))
