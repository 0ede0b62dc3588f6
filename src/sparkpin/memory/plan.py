"""A recipe's memory plan: weights, caches and estimates against a machine's memory. Pure: data in, data out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from sparkpin.core.terminal import gib
from sparkpin.host.machine import HOST_RESERVE
from sparkpin.memory import estimates
from sparkpin.memory.cache import FORMATS, Cache, lay_out
from sparkpin.memory.estimates import Estimate
from sparkpin.memory.geometry import Geometry
from sparkpin.memory.settings import LONG, Settings
from sparkpin.memory.weights import WeightKind
from sparkpin.pins.vllm_flags import AUTO

LENGTHS = (32_768, 131_072, 262_144)
How = Literal["header", "config", "flag", "vLLM's rule", "estimate", "measured"]


@dataclass(frozen=True, slots=True)
class Machine:
    """total, free: bytes; source: which machine that is; how: how well its sizes are known."""

    total: int
    free: int
    source: str
    how: How


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """One share of the memory, and how it is known. span: lowest and highest bytes."""

    what: str
    bytes: int
    span: tuple[int, int]
    how: How
    note: str


def line(what: str, size: Estimate | int, note: str, how: How = "estimate") -> MemoryLine:
    likely, *span = size if isinstance(size, Estimate) else (size, size, size)
    return MemoryLine(what, likely, (span[0], span[1]), how, note)


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
    """Of one machine: of a release for several machines, of each of them.

    inside: shares before the KV pool; outside: shares that vLLM's budget does not count. budget: what vLLM wants to be
    free at its start; None where nothing is asked. pool_line: the KV cache's share.
    """

    geometry: Geometry
    settings: Settings
    machine: Machine
    max_model_len: int
    inside: tuple[MemoryLine, ...]
    outside: tuple[MemoryLine, ...]
    weights: tuple[WeightKind, ...]
    budget: int | None
    pool_line: MemoryLine
    capacities: tuple[Capacity, ...]
    notes: tuple[str, ...] = ()

    @property
    def chosen(self) -> Capacity:
        return next(capacity for capacity in self.capacities if capacity.chosen)

    @property
    def lines(self) -> tuple[MemoryLine, ...]:
        return (*self.inside, *self.outside, self.pool_line)

    @property
    def pool(self) -> int:
        return self.pool_line.bytes

    @property
    def fixed(self) -> int:
        return sum(one.bytes for one in self.inside)

    @property
    def around(self) -> int:
        return sum(one.bytes for one in self.outside)

    @property
    def needed(self) -> int:
        """Of the machine's free memory."""
        return max(self.budget or 0, self.fixed + self.pool) + self.around

    @property
    def left(self) -> int:
        """Bytes of the free memory that nothing of the plan takes; below 0 where it does not fit."""
        return self.machine.free - self.needed

    @property
    def fits(self) -> bool:
        return not self.problems

    @property
    def problems(self) -> list[str]:
        """Why it does not fit."""
        settings, chosen, length, found = self.settings, self.chosen, self.max_model_len, list[str]()
        if length > self.geometry.max_positions and not settings.longer:  # config/model.py, _get_and_verify_max_len
            more = f"{length:,} is more than the model's {self.geometry.max_positions:,} positions"
            found.append(f"--max-model-len {more}: vLLM refuses it without {LONG}=1, YaRN or not")
        if self.budget is not None and not self.pool and self.fixed >= self.budget:
            lack = "nothing is left for the cache"
            found.append(f"weights and the rest take {gib(self.fixed)}, the budget is {gib(self.budget)}: {lack}")
        elif not chosen.cache.requests(chosen.blocks, max(length, 1)):
            longest = chosen.cache.longest(chosen.blocks)
            lack = f"one request of {length:,} tokens, so vLLM would not start: --max-model-len {longest} fits"
            found.append(f"the KV pool of {gib(self.pool)} does not hold {lack if longest else 'a single request'}")
        elif settings.max_num_seqs > chosen.blocks and chosen.cache.states.sizes and not settings.eager:
            # vllm/config/compilation.py, resolve_cudagraph_mode_and_sizes, with graphs of whole decode steps.
            why = f"the pool has {chosen.blocks} blocks, and each sequence needs one for its states"
            found.append(f"--max-num-seqs {settings.max_num_seqs}: {why}, so vLLM would not start")
        if self.left < 0:
            free = f"{gib(self.machine.free)} are free ({self.machine.source})"
            found.append(f"it needs {gib(self.needed)} and {free}")
        return found

    @property
    def hints(self) -> list[str]:
        """What would fit into the free memory."""
        free, least, found = self.machine.free, self.fixed + self.around, list[str]()
        if self.left < 0 and least > free:
            return [f"without any cache it needs {gib(least)}: more memory, a smaller model or fewer tokens a step"]
        if self.budget is not None and self.budget + self.around > free:
            share = math.floor((free - self.around) / self.machine.total * 100) / 100
            found.append(f"--gpu-memory-utilization {share:g} asks for no more than is free")
        if self.pool > free - least and self.pool_line.how == "flag":
            found.append(f"a KV pool of at most {gib(free - least)} fits ({self.pool_line.note})")
        return found


def make_plan(geometry: Geometry, settings: Settings, weights: Sequence[WeightKind], machine: Machine) -> MemoryPlan:
    inside, outside = tuple(inside_lines(geometry, settings, weights)), tuple(outside_lines(settings))
    # gpu_worker.py, cpu_worker.py: a share of all memory must be free at the start, on a GPU even if the pool is given.
    share = math.ceil(machine.total * settings.utilization)
    if settings.kv_bytes is None:
        likely, least, most = map(sum, zip(*((one.bytes, *one.span) for one in inside), strict=True))
        left = Estimate(*(max(0, share - size) for size in (likely, most, least)))
        pool = line("KV pool", left, f"what is left of {settings.utilization:g} of all memory", "vLLM's rule")
    else:
        pool = line("KV pool", settings.kv_bytes, settings.kv_from, "flag")
    own, max_len = lay_out(geometry, settings), settings.max_model_len
    if max_len == AUTO:
        max_len = min(geometry.max_positions, own.longest(own.blocks(pool.bytes)))
    caches = [lay_out(geometry, settings, name) for name in dict.fromkeys((settings.cache_dtype, *FORMATS))]
    return MemoryPlan(
        geometry=geometry,
        settings=settings,
        machine=machine,
        max_model_len=max_len,
        inside=inside,
        outside=outside,
        weights=tuple(weights),
        budget=share if settings.kv_bytes is None or settings.platform == "cuda" else None,
        pool_line=pool,
        capacities=tuple(capacity(one, pool.bytes, max_len, chosen=one == own) for one in caches),
    )


def inside_lines(geometry: Geometry, settings: Settings, weights: Sequence[WeightKind]) -> Iterator[MemoryLine]:
    """What is there before the KV pool."""
    step = f"{settings.max_num_batched_tokens:,} tokens a step, {settings.max_num_seqs:,} sequences"
    yield line("weights", sum(row.held for row in weights), "see below", "header")
    yield line("activations", estimates.activations(geometry, settings), step)
    if settings.platform == "cpu":
        yield line("server process", estimates.CPU_PROCESS, "0.95 GiB measured with scripted-tiny")
        return
    note = "--enforce-eager: none" if settings.eager else "1.29 GiB published for 48 layers"
    yield line("CUDA graphs", estimates.graphs(geometry, settings), note)
    yield line("what vLLM counts as its own", estimates.HELD, "all that MemAvailable falls by meanwhile")
    if buffers := estimates.LOADER_BUFFERS.get(settings.loader):
        yield line("loader's buffers", buffers, f"--load-format {settings.loader}")


def outside_lines(settings: Settings) -> Iterator[MemoryLine]:
    """What vLLM's budget does not count."""
    if settings.platform == "cuda":
        yield line("server outside the budget", estimates.SPARK_SERVER, "unified memory")
        if settings.ranks > 1:
            yield line("NCCL's buffers", estimates.NCCL, "from a report of four Sparks")
        yield line("kept for the machine", HOST_RESERVE, "below it the server is ended", "config")


def capacity(cache: Cache, pool: int, max_len: int, *, chosen: bool) -> Capacity:
    blocks = cache.blocks(pool)
    tokens, concurrency = cache.capacity(blocks, max_len) if max_len > 0 else (0, 0.0)
    lengths = sorted({length for length in (*LENGTHS, max_len) if 0 < length <= max_len})
    return Capacity(cache, chosen, blocks, tokens, concurrency, {n: cache.requests(blocks, n) for n in lengths})
