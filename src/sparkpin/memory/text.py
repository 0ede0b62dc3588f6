"""A memory plan and the speed that it allows, for people and as JSON: every sentence of `plan` stands here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from sparkpin.core.terminal import gib, size
from sparkpin.memory.decode import SHORT, Speed
from sparkpin.memory.plan import Capacity, MemoryLine, MemoryPlan

Row = tuple[str, ...]


def title(plan: MemoryPlan, recipe: str, stage: str) -> Iterator[str]:
    machine, ranks = plan.machine, plan.settings.ranks
    each = f"each of {ranks} machines, " if ranks > 1 else ""
    yield f"Memory plan of recipe {recipe}, stage {stage}, on {each}{machine.source}"
    verdict = "fits" if plan.fits else "DOES NOT FIT, see the end" if plan.problems else "cache unknown, see the end"
    yield f"  {gib(machine.total)} in all, {gib(machine.free)} free ({machine.how}): {verdict}"


def tables(plan: MemoryPlan) -> Iterator[tuple[Row, list[Row]]]:
    """Columns and rows of memory, of weights and, where it is known, of the cache in each format."""
    memory: list[Row] = [(line.what, gib(line.bytes), span_of(line), line.how, line.note) for line in plan.lines]
    memory.append(("needed", gib(plan.needed), "", "", f"of {gib(plan.machine.free)} that are free"))
    if plan.budget is not None:
        share = f"--gpu-memory-utilization {plan.settings.utilization:g}"
        memory.append(("budget", gib(plan.budget), "", "flag", share))
    yield ("what", "size", "range", "known from", "note"), memory
    weights: list[Row] = [(one.kind, f"{one.tensors:,}", gib(one.stored), gib(one.loaded)) for one in plan.weights]
    yield ("weights", "count", "in the checkpoint", "in memory"), weights
    if plan.capacities:
        columns = ("cache, the recipe's first", "block", "bytes a token", "tokens", "concurrency")
        yield (*columns, *(f"requests at {length:,}" for length in plan.requests)), [*map(row_of, plan.capacities)]


def span_of(line: MemoryLine) -> str:
    low, high = map(gib, line.span)
    return "" if low == high else f"{low} to {high}"


def row_of(capacity: Capacity) -> Row:
    cache = capacity.cache
    sizes = (f"{size:,}" for size in (cache.kinds[0].block_size, cache.token_bytes, capacity.tokens))
    return cache.cache_dtype, *sizes, f"{capacity.concurrency:.2f}x", *map(str, capacity.requests.values())


def cache_lines(plan: MemoryPlan) -> Iterator[str]:
    """What is the same for every type of cache, and the chosen one in the words of vLLM's log."""
    if plan.unknown:
        yield f"KV cache: unknown, {plan.unknown}"
        return
    if states := plan.chosen.cache.states_bytes:
        yield f"states of a request: {gib(states)}, whatever the type of the cache"
    yield log_line(plan)


def log_line(plan: MemoryPlan) -> str:
    """vLLM's own figures may differ."""
    device, chosen = "CPU" if plan.settings.platform == "cpu" else "GPU", plan.chosen
    rest = f"Maximum concurrency for {plan.max_model_len:,} tokens per request: {chosen.concurrency:.2f}x"
    return f"vLLM may log: {device} KV cache size: {chosen.tokens:,} tokens, {rest}"


def speed_lines(speed: Speed, ranks: int) -> Iterator[str]:
    step, rate = speed.steps[SHORT], speed.bandwidth
    each = f", each of {ranks} machines" if ranks > 1 else ""

    def what(length: int) -> str:
        return "the weights alone, since the cache is unknown" if step.unknown else f"{length:,} tokens in the cache"

    yield f"Decode: a step of one request reads {size(int(step.bytes))} ({what(SHORT)}{each})"
    if rate is None:
        yield "for the highest speed give the memory's bandwidth: --bandwidth GB/s"
        return
    yield f"at {rate / 1e9:g} GB/s the ceiling is{', without what the machines exchange,' if each else ''}"
    share = f", if {speed.accepted or 0:.0%} of {step.drafted} drafted tokens are accepted" if step.drafted else ""
    ceilings = {length: ceiling for length in speed.steps if (ceiling := speed.ceiling(length))}
    for length, ceiling in ceilings.items():
        yield f"  {ceiling:.1f} tokens/s with {what(length)}{share}"
    if step.drafted:
        yield f"  {step.ceiling(rate):.1f} tokens/s if no draft is accepted, {step.ceiling(rate, 1.0):.1f} if all are"
    for figure in speed.published if ceilings else ():
        fraction = f"{figure.tokens_per_second / ceilings[SHORT]:.0%} of the ceiling"
        yield f"published: {figure.tokens_per_second:g} tokens/s, {fraction}, {figure.date}, {figure.source}"
        yield f"  {figure.says}"


def verdict(plan: MemoryPlan) -> Iterator[str]:
    """The last lines."""
    yield from (f"note: {note}" for note in notes(plan))
    yield from (f"DOES NOT FIT: {problem}" for problem in plan.problems)
    yield from (f"  {hint}" for hint in plan.hints)
    if plan.unknown:
        yield f"how many requests fit is unknown: {plan.unknown} (docs/memory.md has what is known)"
    if plan.fits:
        yield "fits (docs/memory.md says how well each line is known)"


def notes(plan: MemoryPlan) -> Iterator[str]:
    """What else to know."""
    settings, geometry = plan.settings, plan.geometry
    fitting = plan.requests.get(plan.max_model_len, 0)
    if settings.max_num_seqs < fitting:
        yield f"--max-num-seqs {settings.max_num_seqs} lets no more than so many of the {fitting} requests run at once"
    least = plan.pool_line.span[0]
    if plan.fits and not plan.chosen.cache.requests(plan.chosen.cache.blocks(least), plan.max_model_len):
        yield f"the lowest pool of its range, {gib(least)}, would not hold one request"
    if settings.unread:
        yield f"not counted, since this plan does not know what they do: {', '.join(settings.unread)}"
    if plan.max_model_len > (geometry.max_positions or plan.max_model_len) and settings.longer:
        yield f"--max-model-len {plan.max_model_len:,} is more than the model's {geometry.max_positions:,} positions"
    if settings.ranks > 1 and plan.unknown:
        yield f"whether {settings.ranks} machines can share all of it is not checked: {plan.unknown}"
    yield from plan.notes


def to_json(plan: MemoryPlan) -> dict[str, Any]:
    """All numbers in bytes and tokens, with those that are computed from fields."""
    computed = {name: getattr(plan, name) for name in ("fits", "problems", "hints", "needed", "left")}
    return asdict(plan) | computed | {"notes": list(notes(plan))}
