"""The checks that a stage names under `smoke.checks`. Each asks a server something and raises Wrong with a reason."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkpin.errors import ManifestError
from sparkpin.schema import Stage
from sparkpin.smoke import kernels, metrics, mods
from sparkpin.smoke.answers import (
    Answer,
    Wrong,
    a_dict,
    chat_answer,
    json_of,
    only_choice,
    require,
    stream_answer,
    text_of,
    tokens_of,
)
from sparkpin.smoke.expectations import Case, Expectations
from sparkpin.smoke.replies import Fault
from sparkpin.smoke.sse import BadStream

if TYPE_CHECKING:  # it is slow to import, and every task reads which checks there are
    from sparkpin.smoke.client import Client

LEAST_DRAFTED = 50  # fewer drafted tokens say too little about a share
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<function=")


@dataclass(frozen=True)
class Subject:
    """A server that runs, and what is known about it.

    log: everything it has logged so far. mods: those that must be active. floor: least share
    of drafted tokens that must be accepted. kernels: mods whose GPU kernels must all be the image's.
    """

    client: Client
    model: str
    expect: Expectations
    log: Callable[[], bytes]
    mods: frozenset[str] = frozenset()
    floor: float | None = None
    kernels: frozenset[str] = frozenset()


@dataclass(frozen=True)
class CheckResult:
    name: str
    passed: bool
    detail: str
    seconds: float


Check = Callable[[Subject], str]


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


def chat_sampled(subject: Subject) -> str:
    """Sampling has its own kernels, and with MTP its own way of accepting tokens: greedy answers prove neither."""
    return judge_text(subject.expect.chat_sampled, chat(subject, subject.expect.chat_sampled))


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
    log = subject.log()
    seen = mods.reports(log)
    faults = mods.faults(seen, subject.mods) + (kernels.faults(log, subject.kernels) if subject.kernels else [])
    require(not faults, "; ".join(faults))
    told = [f"{mod}: {text}" for mod, text in sorted(kernels.summaries(log).items())]
    return "; ".join([", ".join(sorted(mods.active(seen))) or "none wanted, none active", *told])


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
    "chat-sampled": chat_sampled,
    "mods": active_mods,
    "acceptance": acceptance,
}
READERS = ("mods", "acceptance")  # they read what the others have left in log and metrics, so they come last


def checks_of(stage: Stage) -> tuple[str, ...]:
    """The stage's checks in the order in which they run. An unknown name is a ManifestError.

    So is a stage that asks the server nothing, or does not look at its mods: it would pass without proof.
    """
    file = f"stages/{stage.name}.yaml"
    require_known(stage.smoke.checks, file, "smoke.checks")
    if "acceptance" in stage.smoke.checks and stage.smoke.acceptance_floor is None:
        raise ManifestError(file, "smoke.acceptance_floor", None, "a share from 0 to 1 for the check acceptance")
    if "mods" not in stage.smoke.checks or not set(stage.smoke.checks) - set(READERS):
        raise ManifestError(file, "smoke.checks", stage.smoke.checks, "the check mods, and one that asks for an answer")
    return tuple(sorted(stage.smoke.checks, key=lambda name: name in READERS))


def require_known(names: Iterable[str], file: str, key: str) -> None:
    for name in names:
        if name not in CHECKS:
            raise ManifestError(file, key, name, f"one of {', '.join(CHECKS)}")


def run_check(name: str, subject: Subject) -> CheckResult:
    """Whatever the server does wrong is a result, not an exception."""
    start = time.monotonic()
    try:
        detail, passed = CHECKS[name](subject), True
    except (Wrong, Fault, BadStream) as error:
        detail, passed = str(error), False
    return CheckResult(name, passed, detail, round(time.monotonic() - start, 2))
