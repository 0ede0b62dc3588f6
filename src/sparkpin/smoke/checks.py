"""The checks that a stage names under `smoke.checks`. Each asks a server something and raises Wrong with a reason.

Those that are one case of cases.yaml stand in its table; here are those that ask more than once, far up a prompt, or
read what the others left.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean
from typing import Any

from sparkpin.pins.drafters import speculation
from sparkpin.pins.nodes import nodes_of
from sparkpin.smoke import metrics, mods
from sparkpin.smoke.answers import NotApplicable, Wrong, judge, judge_logprobs, judge_same, require
from sparkpin.smoke.client import Fault
from sparkpin.smoke.evidence import CheckResult
from sparkpin.smoke.expectations import Case, chat_request, table
from sparkpin.smoke.logprobs import drift, logprobs_of
from sparkpin.smoke.subject import CHAT, SmokeSubject

LEAST_DRAFTED = 50  # fewer drafted tokens say too little about a share
STEPS = (8_192, 32_768, 131_072)  # tokens of long prompts
FIRST_STEP = 4_096  # whose speed decides how many of STEPS are asked
LONG_SECONDS = 30.0  # that the next of them may take, as far as the last one's speed shows
LEAST_ROOM = 512  # tokens
TEMPLATE = 200  # tokens that a chat template adds, and the question
CACHED = 6_000  # tokens: more than two of the blocks that a hybrid model's cache has
BROKEN_OFF = 3
BLIND = "not a multimodal model"  # in what a server answers that says so itself
AT_ONCE = 32  # parts of a stream that one read may bring, on a busy machine; a proxy that collects them has more
LONG = 1500  # tokens of an answer that nobody waits for
FREED_SECONDS = 10.0
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
USED = "vllm:kv_cache_usage_perc"


def ask_case(row: dict[str, Any], subject: SmokeSubject) -> str:
    """In each of its ways: the detail of the first, and what the ways were."""
    case = subject.expect.cases.get(row["case"])
    if case is None:
        raise NotApplicable("the scripted model reads text alone")
    if case.request.get("tools") and not subject.expect.tools:
        raise NotApplicable("the model calls no tools")
    if row.get("without") and subject.flags.on(row["without"]):
        raise NotApplicable(f"{row['without']} stands in the release's command")
    details = []
    for way in row["ways"]:
        asked = replace(case, request=case.request | table()["requests"]["sampled"]) if way == "sampled" else case
        try:
            details.append(judge(asked, subject.chat(asked) if way == "whole" else subject.streamed(asked)[0]))
        except Wrong as wrong:
            if BLIND in str(wrong):
                raise NotApplicable("the server answers that it is no multimodal model") from None
            raise Wrong(f"{way}: {wrong}") from None
    return f"{details[0]}, {', '.join(row['ways'])}"


def determinism(subject: SmokeSubject) -> str:
    """At temperature 0, one request at a time: the streamed answer and the plain one, twice each."""
    case = subject.expect.cases["chat"]
    answers = [answer for _ in range(2) for answer in (subject.chat(case), subject.streamed(case)[0])]
    return judge_same("temperature 0", answers)


def logprobs(subject: SmokeSubject) -> str:
    """Of an answer; and of plain English, where it is known how likely the model holds that."""
    detail = judge_logprobs(subject.post(subject.expect.cases["chat"], logprobs=True, top_logprobs=5))
    if (limit := subject.demands.english) is None:
        return detail
    nats = -fmean(logprobs_of(subject.client, subject.model, table()["english"])[1])
    english = f"plain English: {nats:.2f} nats a token, expected at most {limit:g}"
    require(nats <= limit, f"{english}: it reads no language")
    return f"{detail}; {english}"


def metric(text: str, name: str) -> float:
    value = metrics.total(text, name)
    if value is None:
        raise Wrong(f"/metrics has no {name}")
    return value


def cancelled(subject: SmokeSubject) -> str:
    """Clients that go away amid a long answer must leave no request and no cache behind."""
    case, chat = subject.expect.cases["long-text"], subject.expect.cases["chat"]
    before = metric(subject.client.metrics(), USED)
    tokens = min(LONG, (subject.max_model_len or 2 * LONG) // 2)  # the prompt has to fit, too
    body = {"model": subject.model, **case.request, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    parts = []
    for _ in range(BROKEN_OFF):
        subject.client.abandon(CHAT, body)
        parts.append(subject.client.exchanges[-1].body.count(b"\n\n"))
    require(min(parts) <= AT_ONCE, f"a stream began with {min(parts)} parts at once, expected {AT_ONCE} at most")
    until = time.monotonic() + FREED_SECONDS
    while True:
        text = subject.client.metrics()
        left, used = metric(text, RUNNING) + metric(text, WAITING), metric(text, USED)
        if not left and used <= before + 1e-9:
            break
        in_use = f"{left:g} requests and {used:.2%} of the cache are in use, {before:.2%} before"
        require(time.monotonic() < until, f"{in_use}, {FREED_SECONDS:g} s after the last client went")
        time.sleep(0.2)
    after = judge(chat, subject.chat(chat))  # what was freed must serve again
    return f"{BROKEN_OFF} broken off, {used:.2%} of the cache in use as before; then {after}"


def longest_prompt(subject: SmokeSubject, case: Case) -> int:
    """Tokens that a prompt may have beside its answer and the template."""
    if subject.max_model_len is None:
        return STEPS[0]  # a model of less is not served by these recipes
    return subject.max_model_len - int(case.request["max_tokens"]) - TEMPLATE


def prefix_cache(subject: SmokeSubject) -> str:
    """A long prompt answered from nothing and from the cache: the same words."""
    if not subject.flags.on("--enable-prefix-caching", default=True):
        raise NotApplicable("prefix caching is off: --no-enable-prefix-caching stands in the release's command")
    case = subject.expect.recall(CACHED)[0]
    if (room := longest_prompt(subject, case)) < CACHED:
        raise NotApplicable(f"a prompt of {CACHED:,} tokens does not fit: --max-model-len leaves {room:,}")
    # Nothing that an earlier request left may make the first answer a warm one.
    asked = chat_request(f"{secrets.token_hex(8)}\n{case.request['messages'][0]['content']}")
    case = replace(case, request=case.request | asked)
    cold, between = subject.chat(case), metric(subject.client.metrics(), metrics.HITS)
    warm = subject.chat(case)
    found = metric(subject.client.metrics(), metrics.HITS) - between
    require(found > 0, f"the second request reused none of its {warm.prompt:,} tokens in the cache")
    judge(case, cold)
    return f"{judge_same('cold, then warm', [cold, warm])}; {found:g} of {warm.prompt:,} tokens came from the cache"


def long_context(subject: SmokeSubject) -> str:
    """What stands far up in a prompt is found again, at each length that the recipe allows and this machine reads in
    time: one of 4 times the length takes 4 to 16 times as long, as attention's share of the work is."""
    room = longest_prompt(subject, subject.expect.recall(LEAST_ROOM)[0])
    if room < LEAST_ROOM:
        raise NotApplicable(f"--max-model-len leaves {room:,} tokens for a prompt, expected {LEAST_ROOM} at least")
    steps = sorted({min(step, room) for step in (FIRST_STEP, *STEPS)})
    found, skipped, rate = [], "", 0.0
    for step, longer in zip(steps, [*steps[1:], 0], strict=True):
        begin = time.monotonic()
        for case in subject.expect.recall(step):
            answer = subject.chat(case)
            judge(case, answer)
            require(answer.prompt >= step / 2, f"the prompt has {answer.prompt:,} tokens, expected about {step:,}")
        found.append(f"{answer.prompt:,}")
        seconds = time.monotonic() - begin
        rate = answer.prompt * len(subject.expect.recall(step)) / seconds
        if longer and seconds * (longer / step) ** 1.5 > LONG_SECONDS:
            skipped = f"; {longer:,} would take more than {LONG_SECONDS:g} s"
            break
    return f"found in prompts of {', '.join(found)} tokens, the last at {rate:,.0f} tokens/s{skipped}"


def active_mods(subject: SmokeSubject) -> str:
    demands, reported = subject.demands, [mods.reports(log) for log in subject.logs()]
    several = demands.mods and nodes_of(subject.argv) > 1
    for rank, reports in enumerate(reported):
        faults = mods.faults(reports, demands.mods if not rank else set(demands.mods) - mods.OF_THE_API)
        if several and mods.AGREED not in {report.event for report in reports}:
            faults.append("modkit compared release and mods with no other rank (no line in the log)")
        faults += mods.kernel_faults(reports, demands.kernels) if demands.kernels else []
        require(not faults, (f"rank {rank}: " if rank else "") + "; ".join(faults))
    names = ", ".join(sorted(mods.active(reported[0]))) or "none expected, none active"
    details = {**mods.kernel_summaries(reported[0]), **mods.not_needed(reported[0])}
    return "; ".join([names, *(f"{mod}: {text}" for mod, text in sorted(details.items()))])


def acceptance(subject: SmokeSubject) -> str:
    if not speculation(subject.argv):
        raise NotApplicable("the release's command drafts nothing")
    floor, floors = subject.demands.acceptance_floor, subject.demands.position_floors
    counts = metrics.DraftCounts.read(subject.client.metrics())
    if counts is None:
        raise Wrong(f"/metrics has no {metrics.DRAFTED}: the server does not draft")
    require(counts.drafted >= LEAST_DRAFTED, f"{counts.drafted} drafted tokens are too few to judge (add long-text)")
    require(floor is not None and counts.share >= floor, f"{counts}; expected at least {floor}")
    if floors:
        places = len(counts.shares)
        require(places <= len(floors), f"{counts}: {places} positions, floors for {len(floors)}")
        low = any(share < least for share, least in zip(counts.shares, floors, strict=False))
        require(places > 0 and not low, f"{counts}; expected by position at least {list(floors)}")
    return str(counts)


ASKED = (determinism, logprobs, drift, cancelled, prefix_cache, long_context, acceptance)
CHECKS: dict[str, Callable[[SmokeSubject], str]] = {"mods": active_mods}
CHECKS |= {check.__name__.replace("_", "-"): check for check in ASKED}


def run_check(name: str, subject: SmokeSubject) -> CheckResult:
    """Whatever the server does wrong is a result, not an exception."""
    start, passed, applicable = time.monotonic(), True, True
    try:
        row = table()["checks"].get(name)
        detail = ask_case(row, subject) if row else CHECKS[name](subject)
    except NotApplicable as reason:
        detail, applicable = str(reason), False
    except (Wrong, Fault) as error:
        detail, passed = str(error), False
    return CheckResult(name, passed, detail, round(time.monotonic() - start, 2), applicable)
