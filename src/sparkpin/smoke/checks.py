"""The checks that a stage names under `smoke.checks`. Each asks a server something and raises Wrong with a reason."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from sparkpin.pins.nodes import nodes_of
from sparkpin.smoke import kernels, metrics, mods, probes
from sparkpin.smoke.answers import Answer, NotApplicable, Wrong, only_choice, require, text_of, tokens_of
from sparkpin.smoke.drift import drift
from sparkpin.smoke.expectations import Case, Expectations, sampled
from sparkpin.smoke.judging import judge, judge_calls, judge_text
from sparkpin.smoke.replies import Fault
from sparkpin.smoke.sse import BadStream
from sparkpin.smoke.subject import SmokeSubject

LEAST_DRAFTED = 50  # fewer drafted tokens say too little about a share


@dataclass(frozen=True)
class CheckResult:
    name: str
    passed: bool
    detail: str  # what was seen, or why it could not be asked
    seconds: float
    applicable: bool = True  # whether what is served could be asked this

    @property
    def verdict(self) -> str:
        return "not applicable" if not self.applicable else "ok" if self.passed else "FAILED"


Check = Callable[[SmokeSubject], str]
Pick = Callable[[Expectations], Case]
TOOL = "tool-"  # how the names of checks begin that want a tool to be called, or its answer to be read


def in_one(pick: Pick) -> Check:
    """A check of an answer that comes in one piece."""

    def check(subject: SmokeSubject) -> str:
        case = pick(subject.expect)
        return judge(case, subject.chat(case))

    return check


def in_parts(pick: Pick) -> Check:
    """A check of an answer that is streamed."""

    def check(subject: SmokeSubject) -> str:
        case = pick(subject.expect)
        answer, parts = subject.streamed(case)
        return f"{judge(case, answer)}, in {parts} parts"

    return check


def asked_both_ways(pick: Pick) -> Check:
    """A check that a tool is called as it should be, streamed and in one piece, and streamed at temperature 0.7."""

    def check(subject: SmokeSubject) -> str:
        case = pick(subject.expect)
        told, parts = streamed_calls(subject, case, "streamed")
        judge_calls(case, subject.chat(case))
        streamed_calls(subject, sampled(case), "sampled")
        return f"{told}, in {parts} parts, in one and sampled"

    return check


def streamed_calls(subject: SmokeSubject, case: Case, how: str) -> tuple[str, int]:
    answer, parts = subject.streamed(case)
    try:
        return judge_calls(case, answer), parts
    except Wrong as wrong:
        raise Wrong(f"{how}: {wrong}") from None


def completion(subject: SmokeSubject) -> str:
    case = subject.expect.completion
    value = subject.complete(case.request)
    choice = only_choice(value)
    text = text_of(choice.get("text"), "text")
    return judge_text(case, Answer(text, "", (), str(choice.get("finish_reason")), tokens_of(value)))


def tool_answer(subject: SmokeSubject) -> str:
    case = subject.expect.tool_answer
    answer, parts = subject.streamed(case)
    told = judge_text(case, answer)
    judge_text(case, subject.streamed(sampled(case))[0])
    return f"{told}, in {parts} parts and sampled"


def active_mods(subject: SmokeSubject) -> str:
    log, demands = subject.log(), subject.demands
    several = demands.mods and nodes_of(subject.argv) > 1
    for rank, said in enumerate((log, *subject.other_logs())):
        seen = mods.reports(said)
        faults = mods.faults(seen, demands.mods if not rank else set(demands.mods) - mods.OF_THE_API)
        if several and mods.AGREED not in {report.event for report in seen}:
            faults.append("modkit compared release and mods with no other rank (no line in the log)")
        faults += kernels.faults(said, demands.kernels) if demands.kernels else []
        require(not faults, (f"rank {rank}: " if rank else "") + "; ".join(faults))
    seen = mods.reports(log)
    told = [f"{mod}: {text}" for mod, text in sorted(kernels.summaries(log).items())]
    return "; ".join([", ".join(sorted(mods.active(seen))) or "none expected, none active", *told])


def acceptance(subject: SmokeSubject) -> str:
    text, floor, floors = probes.scraped(subject), subject.demands.acceptance_floor, subject.floors
    seen = metrics.acceptance(text)
    if seen is None:
        raise Wrong(f"/metrics has no {metrics.DRAFTED}: the server does not draft")
    require(seen.drafted > 0, "no token was drafted")
    require(seen.drafted >= LEAST_DRAFTED, f"{seen.drafted} drafted tokens are too few to judge (add long-text)")
    require(floor is not None and seen.share >= floor, f"{seen}, expected at least {floor}")
    shares = metrics.by_position(text)
    told = ", ".join(f"{share:.1%}" for share in shares)
    if floors:
        positions = f"{len(shares)} positions of a draft ({told})"
        require(len(shares) <= len(floors), f"{positions}, floors for {len(floors)}")
        low = any(share < least for share, least in zip(shares, floors, strict=False))
        require(bool(shares) and not low, f"by position {told or 'nothing'}, expected at least {list(floors)}")
    return f"{seen}; by position {told}"


CHECKS: dict[str, Check] = {
    "completion": completion,
    "chat": in_one(lambda expect: expect.chat),
    "chat-stream": in_parts(lambda expect: expect.chat),
    "tool-call": in_one(lambda expect: expect.tool_call),
    "tool-call-stream": in_parts(lambda expect: expect.tool_call),
    "tool-answer": tool_answer,
    "long-text": in_one(lambda expect: expect.long_text),
    # Sampling has its own kernels, and with MTP its own way of accepting tokens: greedy answers prove neither.
    "chat-sampled": in_one(lambda expect: sampled(expect.chat)),
    "tool-call-sampled": in_parts(lambda expect: sampled(expect.tool_call)),
    "tool-call-long": asked_both_ways(lambda expect: expect.tool_call_long),
    "tool-calls-parallel": asked_both_ways(lambda expect: expect.tool_calls),
    "tool-call-in-reasoning": asked_both_ways(lambda expect: expect.tool_call_inside),
    "tool-examples": asked_both_ways(lambda expect: expect.tool_examples),
    # The grammar that enforces a call, beside the drafts: both decide about the next token.
    "tool-call-required": asked_both_ways(lambda expect: expect.tool_call_required),
    "unicode": in_one(lambda expect: expect.turkish),
    "determinism": probes.determinism,
    "logprobs": probes.logprobs,
    "drift": drift,
    "cancelled": probes.cancelled,
    "prefix-cache": probes.prefix_cache,
    "long-context": probes.long_context,
    "image": probes.image,
    "mods": active_mods,
    "acceptance": acceptance,
}


def run_check(name: str, subject: SmokeSubject) -> CheckResult:
    """Whatever the server does wrong is a result, not an exception."""
    start, passed, applicable = time.monotonic(), True, True
    try:
        if name.startswith(TOOL) and not subject.expect.tools:
            raise NotApplicable("the pin says that the model calls no tools, so none is asked of it")
        detail = CHECKS[name](subject)
    except NotApplicable as reason:
        detail, applicable = str(reason), False
    except (Wrong, Fault, BadStream) as error:
        detail, passed = str(error), False
    return CheckResult(name, passed, detail, round(time.monotonic() - start, 2), applicable)
