"""Checks of what a server does with more than one request: again, broken off, from its cache, far up a prompt."""

from __future__ import annotations

import secrets
import time
from statistics import fmean

from sparkpin.smoke import metrics
from sparkpin.smoke.answers import NotApplicable, Wrong, chat_answer, json_of, require
from sparkpin.smoke.drift import logprobs_of
from sparkpin.smoke.expectations import ENGLISH, Case, said
from sparkpin.smoke.judging import judge_logprobs, judge_same, judge_text
from sparkpin.smoke.subject import CHAT, SmokeSubject

STEPS = (8_192, 32_768, 131_072)
TEMPLATE = 200  # tokens that a chat template adds, and the question
CACHED = 6_000  # tokens: more than two of the blocks that a hybrid model's cache has
BROKEN_OFF = 3
LONG = 1500  # tokens of an answer that nobody waits for
FREED_SECONDS = 10.0
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
USED = "vllm:kv_cache_usage_perc"
HITS = "vllm:prefix_cache_hits_total"


def determinism(subject: SmokeSubject) -> str:
    """At temperature 0, one request at a time: the streamed answer and the plain one, twice each."""
    case = subject.expect.chat
    answers = [subject.chat(case), subject.streamed(case)[0], subject.chat(case), subject.streamed(case)[0]]
    return judge_same("temperature 0", answers)


def logprobs(subject: SmokeSubject) -> str:
    """Of an answer; and of plain English, where it is known how likely the model holds that."""
    reply = subject.post(subject.expect.chat, logprobs=True, top_logprobs=5)
    told = judge_logprobs(json_of(reply), chat_answer(reply).tokens)
    if (limit := subject.demands.english) is None:
        return told
    nats = -fmean(logprobs_of(subject, ENGLISH)[1])
    require(nats <= limit, f"plain English: {nats:.2f} nats a token, expected at most {limit:g}: it reads no language")
    return f"{told}; plain English: {nats:.2f} nats a token, expected at most {limit:g}"


def image(subject: SmokeSubject) -> str:
    """A picture of one colour is named. A server that serves text alone says so itself."""
    case = subject.expect.image
    if case is None:
        raise NotApplicable("the scripted model reads text alone")
    if subject.flags.on("--language-model-only"):
        raise NotApplicable("--language-model-only stands in the release's command")
    reply = subject.post(case)
    if reply.status == 400 and b"not a multimodal model" in reply.body:
        raise NotApplicable(f"the server says: {reply.start}")
    return judge_text(case, chat_answer(reply))


def scraped(subject: SmokeSubject) -> str:
    reply = subject.client.get("/metrics")
    require(reply.status == 200, f"/metrics: status {reply.status}: {reply.start}")
    return reply.body.decode(errors="replace")


def metric(text: str, name: str) -> float:
    value = metrics.total(text, name)
    if value is None:
        raise Wrong(f"/metrics has no {name}")
    return value


def cancelled(subject: SmokeSubject) -> str:
    """Clients that go away amid a long answer must leave no request and no cache behind."""
    case = subject.expect.long_text
    before = metric(scraped(subject), USED)
    limit = subject.max_model_len
    tokens = LONG if limit is None else min(LONG, limit // 2)  # the prompt has to fit, too
    body = {"model": subject.model, **case.request, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    for _ in range(BROKEN_OFF):
        subject.client.abandon(CHAT, body)
    until = time.monotonic() + FREED_SECONDS
    while True:
        text = scraped(subject)
        left = metric(text, RUNNING) + metric(text, WAITING)
        used = metric(text, USED)
        if not left and used <= before + 1e-9:
            break
        require(
            time.monotonic() < until,
            f"{left:g} requests and {used:.2%} of the cache are in use {FREED_SECONDS:g} s after the last client went, "
            f"{before:.2%} before",
        )
        time.sleep(0.2)
    after = judge_text(subject.expect.chat, subject.chat(subject.expect.chat))  # what was freed must serve again
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
    room = longest_prompt(subject, subject.expect.recall(64)[0])
    if room < CACHED:
        raise NotApplicable(f"a prompt of {CACHED:,} tokens does not fit: --max-model-len leaves {room:,}")
    case = subject.expect.recall(CACHED)[0]
    # Nothing that an earlier request left may make the first answer a warm one.
    first = {**case.request, **said(f"{secrets.token_hex(8)}\n{case.request['messages'][0]['content']}")}
    hits = metric(scraped(subject), HITS)
    cold = chat_answer(subject.post(case, **first))
    between = metric(scraped(subject), HITS)
    warm = chat_answer(subject.post(case, **first))
    found = metric(scraped(subject), HITS) - between
    require(found > 0, f"the second request found none of its {warm.prompt:,} tokens in the cache ({between - hits:g})")
    judge_text(case, cold)
    return f"{judge_same('cold, then warm', [cold, warm])}; {found:g} of {warm.prompt:,} tokens came from the cache"


def long_context(subject: SmokeSubject) -> str:
    """What stands far up in a prompt is found again, at each length that the recipe allows."""
    room = longest_prompt(subject, subject.expect.recall(64)[0])
    steps = [step for step in STEPS if step <= room] or [room]
    if steps[0] < 512:
        raise NotApplicable(f"--max-model-len leaves {room:,} tokens for a prompt, expected 512 at least")
    told = []
    for step in steps:
        for case in subject.expect.recall(step):
            answer = subject.chat(case)
            judge_text(case, answer)
            require(answer.prompt >= step / 2, f"the prompt has {answer.prompt:,} tokens, expected about {step:,}")
        told.append(f"{answer.prompt:,}")
    short = "" if steps[0] == STEPS[0] else f" ({STEPS[0]:,} do not fit)"
    return f"found in prompts of {', '.join(told)} tokens{short}"
