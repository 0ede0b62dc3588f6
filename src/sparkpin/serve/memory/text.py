"""A memory plan for people and for machines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from sparkpin.core.terminal import gib
from sparkpin.serve.memory.plan import Capacity, MemoryPlan

Row = tuple[str, ...]
MEMORY = ("what", "size", "known from", "note")
WEIGHTS = ("weights", "count", "in the checkpoint", "in memory", "note")
CACHES = ("cache", "block", "bytes a token", "tokens", "concurrency")


def title(plan: MemoryPlan, recipe: str, stage: str) -> Iterator[str]:
    machine = plan.machine
    verdict = "fits" if plan.fits else "DOES NOT FIT, see the end"
    each = f"each of {plan.settings.nodes} nodes, " if plan.settings.nodes > 1 else ""
    yield f"Memory plan of recipe {recipe}, stage {stage}, on {each}{machine.source} ({machine.how}): {verdict}"
    free = f"{gib(machine.free)} free" + (f" ({machine.free_how})" if machine.free_how else "")
    yield f"  {gib(machine.total)} in all, {free}"


def memory_rows(plan: MemoryPlan) -> list[Row]:
    rows: list[Row] = [(line.what, gib(line.bytes), line.how, line.note) for line in plan.lines]
    rows.append(("needed", gib(plan.needed), "", "of what is free"))
    if plan.budget is not None:
        share = f"{plan.settings.utilization:g} of all memory"
        rows.append(("budget", gib(plan.budget), "flag", f"--gpu-memory-utilization: {share}"))
    if plan.settings.nodes > 1 and plan.left > 0:
        rows.append(("left", gib(plan.left), "", "of what is free, on each node"))
    return rows


def weight_rows(plan: MemoryPlan) -> list[Row]:
    rows = [(w.kind, f"{w.tensors:,}", gib(w.stored), gib(w.held), w.note) for w in plan.weights]
    count, stored = sum(w.tensors for w in plan.weights), sum(w.stored for w in plan.weights)
    return [*rows, ("in all", f"{count:,}", gib(stored), gib(sum(w.held for w in plan.weights)), "")]


def cache_columns(plan: MemoryPlan) -> tuple[str, ...]:
    """Requests are counted for the lengths up to max_model_len."""
    names = (f"{length // 1024}K" if length % 1024 == 0 else f"{length:,}" for length in plan.chosen.requests)
    return (*CACHES, *(f"requests at {name}" for name in names))


def cache_rows(plan: MemoryPlan) -> list[Row]:
    return [cache_row(capacity) for capacity in plan.capacities]


def cache_row(capacity: Capacity) -> Row:
    cache = capacity.cache
    return (
        f"{cache.cache_dtype}{' (chosen)' if capacity.chosen else ''}",
        f"{cache.block_size:,}",
        f"{cache.token_bytes:,}",
        f"{capacity.tokens:,}",
        f"{capacity.concurrency:.2f}x",
        *(str(count) for count in capacity.requests.values()),
    )


def states_lines(plan: MemoryPlan) -> list[str]:
    """Apart from the table: they are the same for every type of cache."""
    cache = plan.chosen.cache
    return (
        [f"GDN states of a request: {gib(cache.states_bytes)}, whatever the type of the cache"]
        if cache.state_groups
        else []
    )


def log_line(plan: MemoryPlan) -> str:
    """The chosen cache in the words of vLLM's log, whose own figures may differ."""
    device = "CPU" if plan.settings.platform == "cpu" else "GPU"
    return (
        f"vLLM may log: {device} KV cache size: {plan.chosen.tokens:,} tokens, "
        f"Maximum concurrency for {plan.max_model_len:,} tokens per request: {plan.chosen.concurrency:.2f}x"
    )


def to_json(plan: MemoryPlan) -> dict[str, Any]:
    """All numbers in bytes and tokens, with those that are computed from fields."""
    value: dict[str, Any] = {"fits": plan.fits, **asdict(plan)}
    for row, capacity in zip(value["capacities"], plan.capacities, strict=True):
        cache = capacity.cache
        row["cache"] |= {
            "block_bytes": cache.block_bytes,
            "token_bytes": cache.token_bytes,
            "states_bytes": cache.states_bytes,
            "request_blocks": cache.request_blocks(plan.max_model_len),
        }
    return value
