"""The load generator: streams of completions from a server, each with the time of its first token and of its end.

Tokens are counted by the ids that each part of a stream carries (`return_token_ids`), as llama-benchy 0.4 does: with
speculative decoding a part has several. The rate of decode is that of what comes after the first part; what came with
it, in one read, belongs to it, because it has no time of its own.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from sparkpin.core.terminal import say
from sparkpin.host.containers import Container
from sparkpin.measure.bench.plan import PROMPTS, SLACK, BenchPlan
from sparkpin.measure.bench.record import Cell, CellResult, Metric
from sparkpin.measure.quality.run import tokens_in, tokens_of
from sparkpin.pins.vllm_flags import served_name
from sparkpin.releases.record import Release
from sparkpin.smoke import metrics
from sparkpin.smoke.answers import Wrong, require
from sparkpin.smoke.client import Client, Fault, parse_chunks

GENERATED = "vllm:generation_tokens_total"
SETTLE_SECONDS = 0.3  # the server's counters follow its answers
# Seconds that any request may take, and tokens a second of one at a time: what is slower hangs.
LEAST_LIMIT, SLOW_PREFILL, SLOW_DECODE = 600.0, 10, 2
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class BenchTarget:
    """A server that answers. start_seconds: until it did, None where it was up before."""

    release: Release
    container: Container
    client: Client
    start_seconds: float | None

    @property
    def model(self) -> str:
        return served_name(self.release.argv)

    def counters(self) -> str:
        time.sleep(SETTLE_SECONDS)
        return self.client.metrics()


@dataclass(frozen=True)
class TimedAnswer:
    """One request. prompt: its tokens; parts: tokens of its stream's first read, then of each part; begin, first, end:
    moments in seconds, of which `first` is that of the first read."""

    prompt: int
    parts: tuple[int, ...]
    begin: float
    first: float
    end: float


def measure_cells(target: BenchTarget, plan: BenchPlan, seed: int) -> Iterator[CellResult]:
    """In the plan's order. seed: of a sweep's texts.

    Raises:
        Fault, Wrong: no request of a cell was answered.
    """
    texts = random.Random(seed)
    # Tokens of ordinary text, of which random prompts are made: no special ones among them.
    words = tokens_of(target.client, target.model, " ".join(one["text"] for one in PROMPTS))
    for number, cell in enumerate(plan.cells, start=1):
        # The server's own chat template: the recipe may have set another than the model's.
        body = {"model": target.model, "messages": [{"role": "user", "content": cell.prompt}]}
        asked = tokens_in(target.client.post("/tokenize", body)) if cell.prompt else []
        count = 1 + cell.concurrency * cell.batches
        prompts = [asked or texts.choices(words, k=cell.prompt_size) for _ in range(count)]
        row = measure_cell(target, cell, plan.context - SLACK, iter(prompts))
        failed = f", {row.failed} FAILED" if row.failed else ""
        say(f"{number} of {len(plan.cells)}: {cell.name}: {row.output_tokens} tokens in {row.seconds:.1f} s{failed}")
        yield row


def measure_cell(target: BenchTarget, cell: Cell, room: int, prompts: Iterator[list[int]]) -> CellResult:
    """One request that does not count, then the batches. room: tokens that a prompt and its answer may have."""

    def body(most: int = cell.response_size) -> dict[str, Any]:
        prompt = next(prompts)
        return {
            "model": target.model,
            "prompt": prompt,
            "cache_salt": secrets.token_hex(16),  # no prefix cache answers for the model
            "max_tokens": min(most, room - len(prompt)),
            "temperature": 0,
            "ignore_eos": cell.ignore_eos,
            "stream": True,
            "return_token_ids": True,
        }

    limit = LEAST_LIMIT + cell.concurrency * (cell.prompt_size / SLOW_PREFILL + cell.response_size / SLOW_DECODE)
    ask, pool = partial(attempt, target.client, limit), ThreadPoolExecutor(cell.concurrency)
    try:
        ask(body() if cell.prompt else body(WARM_UP_TOKENS))
        before = target.counters()
        batches = [list(pool.map(ask, [body() for _ in range(cell.concurrency)])) for _ in range(cell.batches)]
        after = target.counters()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # Ctrl-C waits for no answer
    target.client.exchanges.clear()
    return result_of(cell, batches, before, after)


def attempt(client: Client, limit: float, body: dict[str, Any]) -> TimedAnswer | str:
    """limit: seconds. Why there was no complete stream of tokens, in a message."""
    begin = time.perf_counter()
    try:
        reply = client.post("/v1/completions", body, timeout=limit)
        require(reply.status == 200, f"status {reply.status}: {reply.start}")
        chunks = [chunk["choices"] for chunk in parse_chunks(reply.body)]
        sizes = [sum(len(choice.get("token_ids") or ()) for choice in choices) for choices in chunks]
        at_once = max(1, reply.body[: reply.first_bytes].count(b"\n\n"))  # events that a busy server has joined
        parts = (sum(sizes[:at_once]), *filter(None, sizes[at_once:]))
        require(parts[0] > 0, "a stream without token ids")
    except (Fault, Wrong) as error:
        return str(error)
    first, end = begin + (reply.first or reply.seconds), begin + reply.seconds
    return TimedAnswer(len(body["prompt"]), parts, begin, first, end)


def rates(batch: Sequence[TimedAnswer]) -> tuple[float, float | None]:
    """Tokens a second of requests that began together, as llama-benchy defines them: of prompts, until the last of them
    has its first part; of answers, from the first part of any to the end of all. None for answers of one part."""
    prefill = sum(one.prompt for one in batch) / (max(one.first for one in batch) - min(one.begin for one in batch))
    later = sum(sum(one.parts[1:]) for one in batch)
    return prefill, later / (max(one.end for one in batch) - min(one.first for one in batch)) if later else None


def result_of(cell: Cell, batches: Sequence[Sequence[TimedAnswer | str]], before: str, after: str) -> CellResult:
    """before, after: the server's /metrics. Fault where no request was answered."""
    every = [[one for one in batch if isinstance(one, TimedAnswer)] for batch in batches]
    answered = [batch for batch in every if batch]
    answers = [one for batch in answered for one in batch]
    failures = [one for batch in batches for one in batch if isinstance(one, str)]
    if not answers:
        raise Fault(f"{cell.name}: none of {len(failures)} requests was answered: {failures[0]}")
    tokens = sum(sum(one.parts) for one in answers)
    together, each = [rates(batch) for batch in answered], [rates([one]) for one in answers]
    decode, decode_each = ([rate for _, rate in found if rate is not None] for found in (together, each))
    ttft = Metric.of([1e3 * (one.first - one.begin) for one in answers])
    counts = metrics.DraftCounts.read(after)
    drafts = counts.since(metrics.DraftCounts.read(before)) if counts else None
    generated = metrics.total(after, GENERATED)
    others = None if generated is None else int(generated - (metrics.total(before, GENERATED) or 0)) - tokens
    return CellResult(
        **{**vars(cell), "prompt_size": answers[0].prompt},
        pp_throughput=Metric.of([rate for rate, _ in together]),
        pp_req_throughput=Metric.of([rate for rate, _ in each]),
        tg_throughput=Metric.of(decode) if decode else None,
        tg_req_throughput=Metric.of(decode_each) if decode else None,
        ttfr=ttft,
        e2e_ttft=ttft,
        seconds=sum(max(one.end for one in batch) - min(one.begin for one in batch) for batch in answered),
        completed=len(answers),
        failed=len(failures),
        output_tokens=tokens,
        later_parts=sum(len(one.parts) - 1 for one in answers),
        later_tokens=sum(sum(one.parts[1:]) for one in answers),
        drafted=drafts.drafted if drafts and drafts.drafted else None,
        accepted=drafts.accepted if drafts and drafts.drafted else None,
        accepted_by_position=drafts.shares if drafts else (),
        others=others,
    )
