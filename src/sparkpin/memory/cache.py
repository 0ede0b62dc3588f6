"""How vLLM cuts the KV pool into blocks: what a request of a length takes, and what the log will say.

Each rule names the file of vLLM 0.32.0 that it was read in; 0.33 differs where `Settings.checkpoints` says so, and has
the rules of v1/core/kv_cache_utils.py in v1/core/kv_cache_planning.py. A test runs vLLM's own code in the image on the
same settings and compares the numbers.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from sparkpin.memory.architecture import Part, UnknownCacheError
from sparkpin.memory.geometry import DTYPE_BYTES, RULES, Geometry
from sparkpin.memory.settings import CACHE_BITS, PACKED, Settings

FORMATS = ("bfloat16", "fp8", *PACKED)  # what a plan compares
LONGEST = 1 << 32  # tokens, more than any model has positions


@dataclass(frozen=True, slots=True)
class Layers:
    """A model's layers that store the same. page: bytes of a block in one layer. slot: bytes of a token in it, or of a
    state. A request takes `copies` blocks, whatever its length; or one for each `block_size` tokens, of the last
    `window` if there is one."""

    part: Part
    slot: int
    page: int
    block_size: int = 0
    copies: int = 0
    window: int = 0

    def request_blocks(self, length: int) -> int:
        """v1/kv_cache_interface.py. A window's begin may lie within a block."""
        if self.copies:
            return self.copies
        tokens = min(length, self.window or length)
        return -(-tokens // self.block_size) + bool(self.window)

    @property
    def type(self) -> Hashable:
        """Layers of one type may share their blocks' numbers: UniformTypeKVCacheSpecs.is_uniform_type."""
        state = (self.copies, self.page, self.part.replicated) if self.copies else ()
        return (self.part.kind, self.block_size, self.window, *state)

    @property
    def like(self) -> Hashable:
        """Layers that are alike in it have one specification, of the model or of a drafter."""
        part = self.part
        return (self.type, self.page, part.heads, part.key, part.value, part.ratio)


@dataclass(frozen=True, slots=True)
class Group:
    """Layers whose blocks have one number. layers: how many; width: bytes of a block in all of them."""

    first: Layers
    layers: int
    width: int


@dataclass(frozen=True, slots=True)
class Cache:
    """The KV pool's layout. kinds: what the layers store, the main attention first. block_bytes: of a block of the
    pool, as wide as the widest group."""

    cache_dtype: str
    kinds: tuple[Layers, ...]
    groups: tuple[Group, ...]
    block_bytes: int

    @property
    def token_bytes(self) -> int:
        """Of a token, in all layers that store each token."""
        kinds = (one for one in self.kinds if one.part.kind == "full")
        return sum(one.part.layers * one.page // one.block_size for one in kinds)

    @property
    def states_bytes(self) -> int:
        """Of a request, whatever its length."""
        return sum(one.part.layers * one.slot * one.copies for one in self.kinds if one.part.kind == "state")

    def request_blocks(self, length: int) -> int:
        """v1/core/kv_cache_utils.py, get_max_concurrency_for_kv_cache_config."""
        return sum(group.first.request_blocks(length) for group in self.groups)

    def blocks(self, pool: int) -> int:
        """Blocks of a pool of so many bytes: get_kv_cache_config_from_groups."""
        return max(pool, 0) // self.block_bytes

    def requests(self, blocks: int, length: int) -> int:
        """Requests of `length` tokens at once. One block of every pool stays unused (v1/core/block_pool.py)."""
        return max(blocks - 1, 0) // self.request_blocks(length)

    def longest(self, blocks: int) -> int:
        """Tokens of the longest request that fits alone."""
        return bisect.bisect_right(range(1, LONGEST), blocks - 1, key=self.request_blocks)

    def capacity(self, blocks: int, length: int) -> tuple[int, float]:
        """What vLLM logs as `KV cache size: N tokens, Maximum concurrency for <length> tokens per request: X`.

        get_kv_cache_capacity. The tokens are the concurrency times the length, so another length gives another size.
        """
        concurrency = blocks / self.request_blocks(length)
        return int(concurrency * length), concurrency


def lay_out(geometry: Geometry, settings: Settings) -> Cache:
    """The pool of one GPU, or of the CPU.

    Raises UnknownCacheError where no rule says what the model stores, or stores in this format.
    """
    architecture, drafter = geometry.architecture, settings.drafter
    for model in filter(None, (geometry, drafter)):
        if model.architecture.unknown:
            raise UnknownCacheError(model.architecture.unknown)
    if settings.draft_layers and not architecture.mtp:
        raise UnknownCacheError("no rule for what its MTP layers keep")
    stored = (*architecture.parts, *architecture.mtp * settings.draft_layers)
    parts = [part.shard(settings.ranks) for part in stored]
    attention = [part for part in parts if part.kind != "state"]
    if not attention:
        raise UnknownCacheError("no rule for a model without attention")
    main = next((part for part in attention if part.kind == "full"), attention[0])
    block = block_size(geometry, settings, main, parts)
    if drafter:
        parts += [replace(part.shard(settings.ranks), of="drafter") for part in drafter.architecture.parts]
    kinds = [layers_of(part, settings, block, block * slot_bytes(main, settings.cache_dtype)) for part in parts]
    groups = tuple(group(kinds, is_packed=architecture.is_packed))
    width = max(one.width for one in groups)
    if architecture.is_packed:  # blocks outermost: _get_kv_cache_bytes_per_block
        shares = [(part, math.gcd(part.kernel, block)) for part in parts if part.kernel]
        stride = math.lcm(*(tokens // part.ratio * part.record for part, tokens in shares if tokens != block))
        width = -(-width // stride) * stride
    return Cache(settings.cache_dtype, tuple(sorted(kinds, key=lambda one: one.part is not main)), groups, width)


def slot_bytes(part: Part, cache_dtype: str) -> int:
    """Key and value of a token in one layer.

    v1/kv_cache_interface.py, AttentionSpec; for TurboQuant (packed) layers/quantization/turboquant/config.py: a key
    of 4 bits has a float16 norm, one of 8 bits nothing; a value has a float16 scale and zero; the sum is made
    even.
    """
    if cache_dtype not in CACHE_BITS:  # a checkpoint's
        raise UnknownCacheError(f"no rule for a cache in {cache_dtype}")
    of_key, of_value = CACHE_BITS[cache_dtype]
    size = math.ceil(part.key * of_key / 8) + math.ceil(part.value * of_value / 8)
    if cache_dtype in PACKED:
        size += 4 if of_key == 8 else 6
        size += size % 2
    return part.heads * size


def layers_of(part: Part, settings: Settings, block: int, main_page: int) -> Layers:
    """main_page: of the main attention, which a state's is padded to."""
    if part.kind == "state":
        # One state is running. "align" (prefix caching) keeps a second, and a third where a prefill stores one on its
        # way; each drafted token has its own: MambaSpec.
        copies = 1 + settings.prefix_caching + bool(stored_every(part, settings)) + settings.draft_tokens
        return Layers(part, state_bytes(part, settings), main_page, copies=copies)
    cache_dtype = settings.cache_dtype
    is_plain = part.kind == "full" and not part.record
    if not cache_dtype.startswith(part.only) or (cache_dtype in PACKED and not is_plain):
        raise UnknownCacheError(f"no rule for what {part.name} keeps in {cache_dtype}")
    slot, size = part.record or slot_bytes(part, cache_dtype), part.block or block
    if part.kind == "ring":
        if settings.draft_tokens > size:
            raise UnknownCacheError(f"no rule for {part.name} of more drafts than {size}")
        size *= 2 if settings.draft_tokens else 1
        return Layers(part, slot, size * slot, size, copies=1)
    page = -(-size // part.ratio * slot // part.align) * part.align
    window = part.window - 1 + settings.in_flight if part.window else 0
    return Layers(part, slot, page, size, window=window)


def stored_every(part: Part, settings: Settings) -> int:
    """Tokens between two states that a prefill may store on its way; 0 where it stores none."""
    if part.kernel_checkpoint and settings.checkpoints:
        return part.kernel_checkpoint
    return part.checkpoint if settings.prefix_caching else 0


def state_bytes(part: Part, settings: Settings) -> int:
    """Convolution's and recurrent state of one layer.

    layers/mamba/mamba_utils.py: the convolution keeps its last inputs, one more for each drafted token.
    """
    inputs = (part.inputs + settings.draft_tokens) * (part.channels + part.groups * part.group)
    return inputs * DTYPE_BYTES[settings.dtype] + part.recurrent * DTYPE_BYTES[settings.ssm_dtype]


def block_size(geometry: Geometry, settings: Settings, main: Part, parts: Sequence[Part]) -> int:
    """Tokens of an attention block: large enough that its page holds the largest state.

    platforms/interface.py, _align_hybrid_block_size: in steps of the block size that was asked for, or of the
    platform's, and always a multiple of what the kernel takes.
    """
    kernels = RULES["packed_block" if settings.cache_dtype in PACKED else "kernel_block"]
    kernel: int = max(kernels[settings.platform], geometry.architecture.block)
    asked = settings.block_size or max(RULES["block"][settings.platform], kernel)
    states = [part for part in parts if part.kind == "state"]
    if not states:
        return asked
    step = math.lcm(max(kernel, asked), *(stored_every(part, settings) or 1 for part in states))
    step_bytes = step * slot_bytes(main, settings.cache_dtype)
    wanted = step * -(-max(state_bytes(part, settings) for part in states) // step_bytes)
    return max(asked, kernel * -(-wanted // kernel))


def group(kinds: Sequence[Layers], *, is_packed: bool) -> Iterator[Group]:
    """v1/core/kv_cache_utils.py, get_kv_cache_groups."""
    if len({one.type for one in kinds}) == 1:
        yield Group(kinds[0], sum(one.part.layers for one in kinds), sum(one.part.layers * one.page for one in kinds))
    elif is_packed and len({one.page for one in kinds}) > 1:
        yield from packed(buckets(kinds, lambda one: one.type))
    else:
        alike = buckets(unified(kinds), lambda one: one.like)
        layers = [sum(same.part.layers for same in one) for one in alike]
        # _get_kv_cache_groups_uniform_page_size: that of the rarest kind, or of the most frequent one if it is less
        # than one and a half times as frequent.
        size = max(layers) if max(layers) < min(layers) * 1.5 else min(layers)
        for (first, *_), every in zip(alike, layers, strict=True):
            yield from (Group(first, count, count * first.page) for count in dealt(every, -(-every // size)))


def buckets(kinds: Iterable[Layers], key: Callable[[Layers], Hashable]) -> Iterable[list[Layers]]:
    found: dict[Hashable, list[Layers]] = {}
    for one in kinds:
        found.setdefault(key(one), []).append(one)
    return found.values()


def unified(kinds: Sequence[Layers]) -> Iterator[Layers]:
    """unify_kv_cache_spec_page_size: the smaller page gets more tokens, or stays in part empty."""
    page = max(one.page for one in kinds)
    for one in kinds:
        if one.copies or page % one.page == 0:
            yield replace(one, page=page, block_size=one.block_size * (1 if one.copies else page // one.page))
        elif one.part.record or not one.part.value:
            raise UnknownCacheError(f"no rule for pages of {one.part.name} next to larger ones")
        else:
            yield replace(one, page=page)


def dealt(layers: int, groups: int) -> list[int]:
    """Layers of each group, dealt out like cards."""
    return [len(range(index, layers, groups)) for index in range(groups)]


def packed(kinds: Iterable[Sequence[Layers]]) -> Iterator[Group]:
    """_get_packed_kv_cache_groups: pages of different sizes side by side in a block. Layers that repeat a pattern of
    pages stay together; others, and states, are divided to fit beside."""
    buckets = [(kind[0], Counter(one.page for one in kind for _ in range(one.part.layers))) for kind in kinds]
    balanced = [pages for _, pages in buckets if len(set(pages.values())) == 1]
    min_repeats = max((max(pages.values()) for pages in balanced if len(pages) > 1), default=0)
    repeats = approximate_gcd([max(pages.values()) for pages in balanced], min_repeats) if min_repeats else 0

    def num_groups(pages: Counter[int]) -> int:
        return -(-max(pages.values()) // repeats) if repeats and pages in balanced else 1

    def is_state(first: Layers) -> bool:
        return bool(first.copies or (first.window and not repeats))

    def widest_group(pages: Counter[int], groups: int) -> int:
        return sum(-(-layers // groups) * page for page, layers in pages.items())

    anchor = max(widest_group(pages, pages.total() if is_state(one) else num_groups(pages)) for one, pages in buckets)
    for first, pages in buckets:
        groups = num_groups(pages)
        if is_state(first):
            states_per_block = max(anchor // first.page, 1)
            groups = max(groups, -(-pages.total() // states_per_block))
        for counts in zip(*(dealt(layers, groups) for layers in pages.values()), strict=True):
            yield Group(first, sum(counts), sum(page * count for page, count in zip(pages, counts, strict=True)))


def approximate_gcd(values: Sequence[int], least: int) -> int:
    """_approximate_gcd: the size, at least `least`, to which they are rounded up with the least loss, or the larger."""
    return min(range(least, max(values) + 1), key=lambda size: (sum(-value % size for value in values), -size))
