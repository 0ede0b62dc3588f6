"""A recipe's memory plan: weights, caches and estimates against a machine's memory. Pure: data in, data out.

What no header and no rule gives is estimated: rough figures with their range. rules.yaml says where each comes from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from sparkpin.core.errors import ManifestError
from sparkpin.core.terminal import gib
from sparkpin.host.machine import HOST_RESERVE
from sparkpin.memory.architecture import UnknownCacheError
from sparkpin.memory.cache import FORMATS, Cache, lay_out
from sparkpin.memory.geometry import DTYPE_BYTES, RULES, Geometry
from sparkpin.memory.settings import GIB, LONG, Settings
from sparkpin.memory.weights import WeightKind
from sparkpin.pins.vllm_flags import AUTO

SPARK_TOTAL, SPARK_FREE = (int(RULES["spark"][name] * GIB) for name in ("total", "free"))
SPARK_BANDWIDTH = RULES["spark"]["bandwidth"] * 1e9  # bytes a second
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
    format first; none where no rule says what the model stores, and unknown is why.
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
        """Raises ManifestError where no rule says what the model stores."""
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
    def needed(self) -> int:
        """Of the machine's free memory."""
        return max(self.budget or 0, total((*self.inside, self.pool_line))) + total(self.outside)

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
        if self.budget is not None and self.budget <= total(self.inside) and not self.pool_line.bytes:
            found.append(f"no cache is left: weights and the rest take {gib(total(self.inside))} of {gib(self.budget)}")
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
            yield f"the KV pool of {gib(self.pool_line.bytes)} does not hold {lack if longest else 'a single request'}"
        elif settings.max_num_seqs > chosen.blocks and chosen.cache.states_bytes and not settings.eager:
            # vllm/config/compilation.py, resolve_cudagraph_mode_and_sizes, with graphs of whole decode steps.
            yield f"--max-num-seqs {settings.max_num_seqs}: each needs one of the pool's {chosen.blocks} blocks"

    @property
    def hints(self) -> list[str]:
        """What would fit into the free memory."""
        outside, found = total(self.outside), list[str]()
        most = self.machine.free - outside - total(self.inside)  # of the pool
        if most < 0:
            least = gib(self.machine.free - most)
            return [f"without any cache it needs {least}: more memory, a smaller model or fewer tokens a step"]
        if self.budget is not None and self.budget + outside > self.machine.free:
            share = math.floor((self.machine.free - outside) / self.machine.total * 100) / 100
            found.append(f"--gpu-memory-utilization {share:g} asks for no more than is free")
        if self.pool_line.bytes > most and self.pool_line.how == "flag":
            found.append(f"a KV pool of at most {gib(most)} fits ({self.pool_line.note})")
        return found


def total(lines: Iterable[MemoryLine]) -> int:
    return sum(line.bytes for line in lines)


def make_plan(geometry: Geometry, settings: Settings, weights: Sequence[WeightKind], machine: Machine) -> MemoryPlan:
    inside, outside = tuple(inside_lines(geometry, settings, weights)), tuple(outside_lines(settings))
    # gpu_worker.py, cpu_worker.py: a share of all memory must be free at the start, on a GPU even if the pool is given.
    share = math.ceil(machine.total * settings.utilization)
    if settings.kv_bytes is None:
        columns = zip(*((line.bytes, *line.span) for line in inside), strict=True)
        likely, most, least = (max(0, share - sum(sizes)) for sizes in columns)
        rule = f"what is left of {settings.utilization:g} of all memory"
        pool = MemoryLine("KV pool", likely, (least, most), "vLLM's rule", rule)
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
    """In the settings' own format and those to compare it with; none, and why, where the first is not known."""
    caches = list[Cache]()
    for name in dict.fromkeys((settings.cache_dtype, *FORMATS)):
        try:
            caches.append(lay_out(geometry, replace(settings, cache_dtype=name)))
        except UnknownCacheError as error:
            if not caches:
                return [], str(error)
    return caches, ""


def inside_lines(geometry: Geometry, settings: Settings, weights: Sequence[WeightKind]) -> Iterator[MemoryLine]:
    """What is there before the KV pool."""
    loaded = sum(row.loaded for row in weights)
    yield MemoryLine("weights", loaded, (loaded, loaded), "header", "see below")
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


def estimated(what: str, scale: float = 1.0) -> MemoryLine:
    """A row of `estimates` in rules.yaml. scale: of its likely size."""
    likely, low, high = (int(size * GIB) for size in RULES["estimates"][what]["gib"])
    return MemoryLine(what, int(likely * scale), (low, high), "estimate", RULES["estimates"][what]["note"])


def activations(geometry: Geometry, settings: Settings) -> MemoryLine:
    """Peak of the profiling step, which runs max_num_batched_tokens at once: its largest layer, its sampler, or the
    vision encoder before it.

    Counted are the tensors that live together: residual stream and layer norms, and of the layer its projections, chunk
    states or the experts' work buffers; of the sampler the logits at 16 bits and two float32 copies. The kernels' own
    workspaces are not, so the true peak may be higher.
    """
    share, size, tokens = geometry.shard(settings.ranks), DTYPE_BYTES[settings.dtype], settings.max_num_batched_tokens
    values = share.value_heads * share.value_dim
    mixed = 2 * share.key_heads * share.key_dim + values
    per_token = (
        size * max(1, share.experts_per_token) * (max(2 * share.expert_width, share.hidden) + share.expert_width),
        size * (2 * mixed + 3 * values) + size * values * share.key_dim // RULES["chunk"],
        size * share.head_dim * (4 * share.heads + 2 * share.kv_heads),
    )
    # Checking drafted tokens is profiled with a second row of logits a sequence (v1/worker/gpu_model_runner.py).
    rows = min(tokens, settings.max_num_seqs) * (2 if settings.draft_tokens else 1)
    text = max(tokens * (max(per_token) + 4 * size * share.hidden), rows * share.vocabulary * (size + 8))
    image = 0 if settings.text_only else max(tokens, RULES["image"]["tokens"]) * RULES["image"]["token_bytes"]
    peak, step = max(text, image), f"{tokens:,} tokens a step, {settings.max_num_seqs:,} sequences"
    return MemoryLine("activations", peak, (text, peak * 3 // 2), "estimate", step)
