"""A recipe's memory plan: weights, caches and estimates against a machine's memory. Pure: data in, data out."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sparkpin.core.errors import ManifestError
from sparkpin.core.terminal import gib
from sparkpin.host.machine import HOST_RESERVE
from sparkpin.memory.architecture import UnknownCacheError
from sparkpin.memory.cache import FORMATS, Cache, lay_out
from sparkpin.memory.estimates import How, MemoryLine, activations, estimated
from sparkpin.memory.geometry import Geometry
from sparkpin.memory.settings import LONG, Settings
from sparkpin.memory.weights import WeightKind
from sparkpin.pins.vllm_flags import AUTO

LENGTHS = (32_768, 131_072, 262_144)


@dataclass(frozen=True, slots=True)
class Machine:
    """total, free: bytes; source: which machine that is; how: how well its sizes are known."""

    total: int
    free: int
    source: str
    how: How


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a pool holds in one cache format. tokens, concurrency: as vLLM logs them for max_model_len.

    requests: length -> how many of that length fit at once, for the lengths up to max_model_len.
    """

    cache: Cache
    blocks: int
    tokens: int
    concurrency: float
    requests: dict[int, int]


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Of one machine: of a release for several machines, of each of them.

    inside: shares before the KV pool; outside: shares that vLLM's budget does not count. budget: what vLLM wants to be
    free at its start; None where nothing is asked. pool_line: the KV cache's share. capacities: that of the recipe's
    format first; none where no rule says what the model keeps, and unknown is why.
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
    unknown: str = ""
    notes: tuple[str, ...] = ()

    @property
    def chosen(self) -> Capacity:
        """Raises ManifestError where no rule says what the model keeps."""
        if self.unknown:
            step = "invoke plan prints the rest; vLLM's log has the cache once it is served"
            raise ManifestError("config.json", "the KV cache", self.unknown, "a known architecture", next_step=step)
        return self.capacities[0]

    @property
    def requests(self) -> dict[int, int]:
        """Of `chosen`; none where that is unknown."""
        return self.capacities[0].requests if self.capacities else {}

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
        return not (self.problems or self.unknown)

    @property
    def problems(self) -> list[str]:
        """Why it does not fit."""
        length, most, found = self.max_model_len, self.geometry.max_positions, list[str]()
        if length > (most or length) and not self.settings.longer:  # config/model.py, _get_and_verify_max_len
            found.append(f"--max-model-len {length:,}: beyond {most:,} vLLM requires {LONG}=1")
        if self.budget is not None and not self.pool and self.fixed >= self.budget:
            found.append(f"no cache is left: weights and the rest take {gib(self.fixed)} of {gib(self.budget)}")
        elif self.capacities:
            found += self.lacks(self.chosen)
        if self.left < 0:
            found.append(f"it needs {gib(self.needed)}, {gib(self.machine.free)} are free ({self.machine.source})")
        return found

    def lacks(self, chosen: Capacity) -> Iterator[str]:
        """What its pool does not hold."""
        settings, length = self.settings, self.max_model_len
        if not chosen.cache.requests(chosen.blocks, max(length, 1)):
            longest = chosen.cache.longest(chosen.blocks)
            lack = f"one request of {length:,} tokens, so vLLM would not start: --max-model-len {longest} fits"
            yield f"the KV pool of {gib(self.pool)} does not hold {lack if longest else 'a single request'}"
        elif settings.max_num_seqs > chosen.blocks and chosen.cache.states_bytes and not settings.eager:
            # vllm/config/compilation.py, resolve_cudagraph_mode_and_sizes, with graphs of whole decode steps.
            yield f"--max-num-seqs {settings.max_num_seqs}: each needs one of the pool's {chosen.blocks} blocks"

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
        sizes = zip(*((one.bytes, *reversed(one.span)) for one in inside), strict=True)
        likely, *span = (max(0, share - sum(taken)) for taken in sizes)
        rule = f"what is left of {settings.utilization:g} of all memory"
        pool = MemoryLine("KV pool", likely, (span[0], span[1]), "vLLM's rule", rule)
    else:
        pool = MemoryLine("KV pool", settings.kv_bytes, (settings.kv_bytes,) * 2, "flag", settings.kv_from)
    caches, unknown = known_caches(geometry, settings)
    max_len = settings.max_model_len
    if max_len == AUTO:
        fitting = caches[0].longest(caches[0].blocks(pool.bytes)) if caches else geometry.max_positions
        max_len = min(geometry.max_positions, fitting)
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
        capacities=tuple(capacity(cache, pool.bytes, max_len) for cache in caches),
        unknown=unknown,
    )


def known_caches(geometry: Geometry, settings: Settings) -> tuple[list[Cache], str]:
    """The settings' own format and those to compare it with; none, and why, where that is not known."""
    try:
        caches = [lay_out(geometry, settings)]
    except UnknownCacheError as error:
        return [], str(error)
    for name in FORMATS:
        if name != settings.cache_dtype:
            with contextlib.suppress(UnknownCacheError):
                caches.append(lay_out(geometry, settings, name))
    return caches, ""


def inside_lines(geometry: Geometry, settings: Settings, weights: Sequence[WeightKind]) -> Iterator[MemoryLine]:
    """What is there before the KV pool."""
    held = sum(row.held for row in weights)
    yield MemoryLine("weights", held, (held, held), "header", "see below")
    yield activations(geometry, settings)
    if settings.platform == "cpu":
        yield estimated("server process")
        return
    if not settings.eager:
        drafting = settings.drafter.layers if settings.drafter else settings.draft_layers
        yield estimated("CUDA graphs", (geometry.layers + drafting) / 48)
    yield estimated("what vLLM counts as its own")
    if settings.loader == "instanttensor":
        yield estimated("loader's buffers")


def outside_lines(settings: Settings) -> Iterator[MemoryLine]:
    """What vLLM's budget does not count."""
    if settings.platform == "cuda":
        yield estimated("server outside the budget")
        if settings.ranks > 1:
            yield estimated("NCCL's buffers")
        yield MemoryLine("kept for the machine", HOST_RESERVE, (HOST_RESERVE,) * 2, "config", "server ends below it")


def capacity(cache: Cache, pool: int, max_len: int) -> Capacity:
    blocks = cache.blocks(pool)
    tokens, concurrency = cache.capacity(blocks, max_len) if max_len > 0 else (0, 0.0)
    lengths = sorted({length for length in (*LENGTHS, max_len) if 0 < length <= max_len})
    return Capacity(cache, blocks, tokens, concurrency, {n: cache.requests(blocks, n) for n in lengths})
