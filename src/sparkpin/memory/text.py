"""A memory plan and the speed that it allows, for people and as JSON: every sentence of `plan` stands here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from sparkpin.core.terminal import gib, size
from sparkpin.memory.decode import SHORT, Speed
from sparkpin.memory.estimates import SPARK_BANDWIDTH
from sparkpin.memory.plan import Capacity, MemoryPlan
from sparkpin.memory.weights import WeightKind

Row = tuple[str, ...]
MEMORY = ("what", "size", "range", "known from", "note")
WEIGHTS = ("weights", "count", "in the checkpoint", "in memory")
CACHES = ("cache", "block", "bytes a token", "tokens", "concurrency")


def title(plan: MemoryPlan, recipe: str, stage: str) -> Iterator[str]:
    machine, ranks = plan.machine, plan.settings.ranks
    verdict = "fits" if plan.fits else "DOES NOT FIT, see the end"
    each = f"each of {ranks} machines, " if ranks > 1 else ""
    yield f"Memory plan of recipe {recipe}, stage {stage}, on {each}{machine.source} ({machine.how}): {verdict}"
    yield f"  {gib(machine.total)} in all, {gib(machine.free)} free"


def memory_rows(plan: MemoryPlan) -> Iterator[Row]:
    for line in plan.lines:
        low, high = map(gib, line.span)
        yield line.what, gib(line.bytes), "" if low == high else f"{low} to {high}", line.how, line.note
    yield "needed", gib(plan.needed), "", "", "of what is free"
    if plan.budget is not None:
        share = f"{plan.settings.utilization:g} of all memory"
        yield "budget", gib(plan.budget), "", "flag", f"--gpu-memory-utilization: {share}"
    if plan.left > 0:
        yield "left", gib(plan.left), "", "", "of what is free"


def weight_rows(plan: MemoryPlan) -> Iterator[Row]:
    rows = plan.weights
    stored, held = sum(one.stored for one in rows), sum(one.held for one in rows)
    for one in (*rows, WeightKind("in all", sum(one.tensors for one in rows), stored, held, 0)):
        yield one.kind, f"{one.tensors:,}", gib(one.stored), gib(one.held)


def cache_columns(plan: MemoryPlan) -> Row:
    """Requests are counted for the lengths up to max_model_len."""
    names = (f"{length // 1024}K" if length % 1024 == 0 else f"{length:,}" for length in plan.chosen.requests)
    return (*CACHES, *(f"requests at {name}" for name in names))


def cache_row(capacity: Capacity) -> Row:
    cache, chosen = capacity.cache, " (chosen)" if capacity.chosen else ""
    sizes = (f"{size:,}" for size in (cache.block_size, cache.token_bytes, capacity.tokens))
    requests = (str(count) for count in capacity.requests.values())
    return f"{cache.cache_dtype}{chosen}", *sizes, f"{capacity.concurrency:.2f}x", *requests


def cache_lines(plan: MemoryPlan) -> Iterator[str]:
    """What is the same for every type of cache, and the chosen one in the words of vLLM's log."""
    if plan.chosen.cache.states.sizes:
        yield f"GDN states of a request: {gib(plan.chosen.cache.states_bytes)}, whatever the type of the cache"
    yield log_line(plan)


def log_line(plan: MemoryPlan) -> str:
    """vLLM's own figures may differ."""
    device, chosen = "CPU" if plan.settings.platform == "cpu" else "GPU", plan.chosen
    rest = f"Maximum concurrency for {plan.max_model_len:,} tokens per request: {chosen.concurrency:.2f}x"
    return f"vLLM may log: {device} KV cache size: {chosen.tokens:,} tokens, {rest}"


def speed_lines(speed: Speed, ranks: int) -> Iterator[str]:
    step, rate, ceiling = speed.steps[SHORT], speed.bandwidth, speed.ceiling()
    each = f", each of {ranks} machines" if ranks > 1 else ""
    yield f"Decode: a step of one request reads {size(int(step.bytes))} ({SHORT:,} tokens in the cache{each})"
    if rate is None:
        yield "for the highest speed give the memory's bandwidth: --bandwidth GB/s"
        return
    whose = " (a DGX Spark's memory)" if rate == SPARK_BANDWIDTH else ""
    at = f"at {rate / 1e9:g} GB/s{whose} the ceiling is"
    drafts = f"if none of {step.drafted} drafted tokens is accepted, {step.ceiling(rate, 1.0):.1f} if all are"
    if ceiling is None:
        yield f"{at} {step.ceiling(rate):.1f} tokens/s {drafts}"
        return
    share = f" if {speed.accepted:.0%} of {step.drafted} drafted tokens are accepted" if step.drafted else ""
    yield f"{at} {ceiling:.1f} tokens/s{share}"
    if step.drafted:
        yield f"  {step.ceiling(rate):.1f} tokens/s {drafts}"
    for length in [*speed.steps][1:]:
        yield f"  {speed.ceiling(length):.1f} tokens/s with {length:,} tokens in the cache"
    if ranks > 1:
        yield "  without the time that the machines take to exchange their results"
    for figure in speed.published:
        rate = figure.tokens_per_second
        yield f"published: {rate:g} tokens/s, {rate / ceiling:.0%} of the ceiling, {figure.date}, {figure.source}"
        yield f"  {figure.says}"


def verdict(plan: MemoryPlan) -> Iterator[str]:
    """The last lines."""
    yield from (f"note: {note}" for note in notes(plan))
    yield from (f"DOES NOT FIT: {problem}" for problem in plan.problems)
    yield from (f"  {hint}" for hint in plan.hints)
    if plan.fits:
        rest = ", except for what is not counted" if plan.settings.unread else ""
        yield f"fits{rest} (docs/memory.md says how well each line is known)"


def notes(plan: MemoryPlan) -> Iterator[str]:
    """What else to know."""
    settings, cache, geometry = plan.settings, plan.chosen.cache, plan.geometry
    fitting = plan.chosen.requests.get(plan.max_model_len, 0)
    if settings.max_num_seqs < fitting:
        yield f"--max-num-seqs {settings.max_num_seqs} lets no more than so many of the {fitting} requests run at once"
    least = plan.pool_line.span[0]
    if plan.fits and not cache.requests(cache.blocks(least), plan.max_model_len):
        yield f"the lowest pool of its range, {gib(least)}, would not hold one request"
    if settings.unread:
        yield f"not counted, since this plan does not know what they do: {', '.join(settings.unread)}"
    if plan.max_model_len > geometry.max_positions and settings.longer:
        yield f"--max-model-len {plan.max_model_len:,} is more than the model's {geometry.max_positions:,} positions"
    yield from plan.notes


def to_json(plan: MemoryPlan) -> dict[str, Any]:
    """All numbers in bytes and tokens, with those that are computed from fields."""
    value: dict[str, Any] = asdict(plan)
    value |= {name: getattr(plan, name) for name in ("fits", "problems", "hints", "needed", "left")}
    value |= {"notes": list(notes(plan))}
    for row, one in zip(value["capacities"], plan.capacities, strict=True):
        row["cache"]["request_blocks"] = one.cache.request_blocks(plan.max_model_len)
    return value
