"""A recipe's memory plan: weights, caches and estimates against a machine's memory. Pure: data in, data out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sparkpin.core.terminal import gib
from sparkpin.pins.vllm_flags import AUTO
from sparkpin.serve.memory import estimates
from sparkpin.serve.memory.cache import FORMATS, Cache, lay_out
from sparkpin.serve.memory.geometry import Geometry
from sparkpin.serve.memory.settings import LONG, Settings
from sparkpin.serve.memory.weights import HEAD, WeightKind

SEE_BELOW = "see below"  # in the tables of `invoke plan`
LENGTHS = (32_768, 131_072, 262_144)
How = Literal["header", "config", "flag", "vLLM's rule", "estimate", "measured"]


@dataclass(frozen=True, slots=True)
class Machine:
    """total, free: bytes; source: where these are from, and how well they are known; free_how: `free` alone."""

    total: int
    free: int
    source: str
    how: How
    free_how: How | None = None


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """One share of the memory, and how it is known."""

    what: str
    bytes: int
    how: How
    note: str = ""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a pool holds in one cache format. tokens, concurrency: as vLLM logs them for max_model_len.

    requests: length -> how many of that length fit at once, for the lengths up to max_model_len.
    """

    cache: Cache
    chosen: bool
    blocks: int
    tokens: int
    concurrency: float
    requests: dict[int, int]


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Of one machine: of a release for several nodes, of each of them.

    budget: what vLLM wants to be free at its start; None where nothing is asked. pool: bytes for the KV cache.

    needed: of the machine's free memory. problems: why it does not fit; hints: what would; notes: what else to know.
    """

    settings: Settings
    machine: Machine
    max_model_len: int
    lines: tuple[MemoryLine, ...]
    weights: tuple[WeightKind, ...]
    budget: int | None
    pool: int
    needed: int
    capacities: tuple[Capacity, ...]
    problems: tuple[str, ...]
    hints: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def chosen(self) -> Capacity:
        return next(capacity for capacity in self.capacities if capacity.chosen)

    @property
    def left(self) -> int:
        """Bytes of the free memory that nothing of the plan takes; below 0 where it does not fit."""
        return self.machine.free - self.needed

    @property
    def fits(self) -> bool:
        return not self.problems


def make_plan(geometry: Geometry, settings: Settings, weights: Sequence[WeightKind], machine: Machine) -> MemoryPlan:
    cuda = settings.platform == "cuda"
    lines = fixed_lines(geometry, settings, weights)
    fixed = sum(line.bytes for line in lines)
    around = around_lines(settings)
    outside = sum(line.bytes for line in around)
    # gpu_worker.py, cpu_worker.py: a share of all memory must be free at the start, on a GPU even if the pool is given.
    share = math.ceil(machine.total * settings.utilization)
    budget = share if settings.kv_bytes is None or cuda else None
    pool = max(0, share - fixed) if settings.kv_bytes is None else settings.kv_bytes
    own = lay_out(geometry, settings)
    if settings.blocks:
        pool = settings.blocks * own.block_bytes
    needed = max(budget or 0, fixed + pool) + outside
    max_len = settings.max_model_len
    if max_len == AUTO:
        max_len = min(geometry.max_positions, own.longest(own.blocks(pool)))
    formats = dict.fromkeys((settings.cache_dtype, *FORMATS))
    capacities = tuple(
        capacity(lay_out(geometry, settings, name), pool, max_len, chosen=name == settings.cache_dtype)
        for name in formats
    )
    lines += around
    lines.append(
        MemoryLine(
            "KV pool",
            pool,
            "flag" if settings.kv_bytes is not None or settings.blocks else "vLLM's rule",
            pool_note(settings),
        )
    )
    return MemoryPlan(
        settings=settings,
        machine=machine,
        max_model_len=max_len,
        lines=tuple(lines),
        weights=tuple(weights),
        budget=budget,
        pool=pool,
        needed=needed,
        capacities=capacities,
        problems=(
            *too_long(geometry, settings, max_len),
            *problems(own, pool, max_len, needed, fixed, budget, machine),
        ),
        hints=tuple(hints(settings, pool, needed, fixed, budget, machine, outside)),
        notes=tuple(notes(geometry, settings, weights, own, capacities, max_len)),
    )


def around_lines(settings: Settings) -> list[MemoryLine]:
    """What vLLM's budget does not count."""
    if settings.platform != "cuda":
        return []
    note = "unified memory: users report about 5.6 GiB"
    lines = [MemoryLine("server outside the budget", estimates.SPARK_HOST, "estimate", note)]
    if settings.ranks > 1:
        lines.append(MemoryLine("NCCL's buffers", estimates.NCCL, "estimate", "from a report of four Sparks"))
    return lines


def fixed_lines(geometry: Geometry, settings: Settings, weights: Sequence[WeightKind]) -> list[MemoryLine]:
    """What is there before the KV pool."""
    lines = [MemoryLine("weights", sum(row.held for row in weights), "header", SEE_BELOW)]
    if settings.platform == "cuda":
        graphs, context = estimates.graphs(geometry, settings), estimates.CUDA_CONTEXT
        note = "--enforce-eager: none" if settings.eager else "1.29 GiB published for 48 layers"
        lines.append(MemoryLine("CUDA graphs", graphs, "estimate", note))
        lines.append(MemoryLine("CUDA context", context, "estimate", "not measured on a GB10"))
    else:
        lines.append(
            MemoryLine("server process", estimates.CPU_PROCESS, "estimate", "0.95 GiB measured with scripted-tiny")
        )
    note = f"{settings.max_num_batched_tokens:,} tokens a step, {settings.max_num_seqs:,} sequences"
    lines.append(MemoryLine("activations", estimates.activations(geometry, settings), "estimate", note))
    return lines


def pool_note(settings: Settings) -> str:
    if settings.blocks:
        return "--num-gpu-blocks-override"
    if settings.kv_bytes is not None:
        return settings.kv_from
    return f"what is left of {settings.utilization:g} of all memory"


def capacity(cache: Cache, pool: int, max_len: int, *, chosen: bool) -> Capacity:
    blocks = cache.blocks(pool)
    tokens, concurrency = cache.capacity(blocks, max_len) if max_len > 0 else (0, 0.0)
    lengths = sorted({length for length in (*LENGTHS, max_len) if 0 < length <= max_len})
    return Capacity(
        cache, chosen, blocks, tokens, concurrency, {length: cache.requests(blocks, length) for length in lengths}
    )


def problems(
    cache: Cache, pool: int, max_len: int, needed: int, fixed: int, budget: int | None, machine: Machine
) -> list[str]:
    found = []
    if not pool and budget is not None and fixed >= budget:
        found.append(
            f"weights and the rest take {gib(fixed)}, the budget is {gib(budget)}: nothing is left for the cache"
        )
    elif cache.requests(cache.blocks(pool), max(max_len, 1)) < 1:
        longest = cache.longest(cache.blocks(pool))
        found.append(
            f"the KV pool of {gib(pool)} does not hold one request of {max_len:,} tokens, so vLLM would not start: "
            f"--max-model-len {longest} fits"
            if longest
            else f"the KV pool of {gib(pool)} does not hold a single request"
        )
    if needed > machine.free:
        found.append(f"it needs {gib(needed)} and {gib(machine.free)} are free ({machine.source})")
    return found


def too_long(geometry: Geometry, settings: Settings, max_len: int) -> list[str]:
    """vllm/config/model.py, _get_and_verify_max_len."""
    if max_len <= geometry.max_positions or settings.longer:
        return []
    said = f"--max-model-len {max_len:,} is more than the model's {geometry.max_positions:,} positions: vLLM refuses it"
    return [f"{said} without {LONG}=1, YaRN or not" if settings.yarn else said]


def hints(
    settings: Settings, pool: int, needed: int, fixed: int, budget: int | None, machine: Machine, outside: int
) -> list[str]:
    """What would fit into the free memory."""
    if needed <= machine.free:
        return []
    left = machine.free - outside - fixed
    if left < 0:
        return [
            f"without any cache it needs {gib(fixed + outside)}: more memory, a smaller model or fewer tokens a step"
        ]
    found = []
    if budget is not None and budget + outside > machine.free:
        share = math.floor((machine.free - outside) / machine.total * 100) / 100
        found.append(f"--gpu-memory-utilization {share:g} asks for no more than is free")
    if pool > left and (settings.kv_bytes is not None or settings.blocks):
        found.append(f"a KV pool of at most {gib(left)} fits ({pool_note(settings)})")
    return found


def notes(
    geometry: Geometry,
    settings: Settings,
    weights: Sequence[WeightKind],
    cache: Cache,
    capacities: Sequence[Capacity],
    max_len: int,
) -> list[str]:
    found = [f"all of it is of each of {settings.nodes} nodes"] if settings.nodes > 1 else []
    fitting = next(c.requests.get(max_len, 0) for c in capacities if c.chosen)
    if settings.max_num_seqs < fitting:
        found.append(
            f"--max-num-seqs {settings.max_num_seqs} lets no more than that many of the {fitting} requests run at once"
        )
    if settings.unread:
        found.append(f"not counted, since this plan does not know what they do: {', '.join(settings.unread)}")
    if max_len > geometry.max_positions and settings.longer:
        found.append(f"--max-model-len {max_len:,} is more than the model's {geometry.max_positions:,} positions")
    if settings.yarn:
        found.append(
            f"YaRN reaches {settings.yarn:,} positions and changes short prompts, too (docs/memory.md#a-million-tokens)"
        )
    if cache.padding:
        found.append(
            f"the layers do not fill the cache's groups {list(cache.groups)}: {cache.padding} of "
            f"{len(cache.groups) * cache.group_size} places stay empty"
        )
    if whole := sum(row.whole for row in weights):
        found.append(f"{gib(whole)} of the weights are not divided: routers, norms and others are on every node")
    if settings.ranks > geometry.kv_heads:
        found.append(
            f"{geometry.kv_heads} KV heads for {settings.ranks}: each lies on {settings.ranks // geometry.kv_heads} of "
            f"them, and a token's keys and values take as much of each as with {geometry.kv_heads}"
        )
    saved = sum(row.stored - row.held for row in weights if row.kind == HEAD)
    if saved > 0 and settings.ranks == 1:
        found.append(f"the INT8 LM head saves {gib(saved)}; while loading, both are there")
    return found
