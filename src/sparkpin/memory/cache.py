"""How vLLM cuts the KV pool into blocks: what a request of a length takes, and what the log will say.

Each rule names the file of vLLM 0.32.0 that it was read in; 0.33 differs where `Settings.checkpoints` says so. A test
runs vLLM's own code in the image on the same settings and compares the numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sparkpin.memory.geometry import DTYPE_BYTES, RULES, Geometry
from sparkpin.memory.settings import CACHE_BITS, PACKED, Settings

FORMATS = ("bfloat16", "fp8", *PACKED)  # what a plan compares


@dataclass(frozen=True, slots=True)
class Groups:
    """Layers that are cached alike. sizes: layers of each group.

    A request takes of each group's blocks: `copies`, whatever its length; or one for each `block_size` tokens.
    """

    sizes: tuple[int, ...]
    block_size: int = 0
    copies: int = 0

    def request_blocks(self, length: int) -> int:
        """v1/kv_cache_interface.py."""
        return len(self.sizes) * (-(-length // self.block_size) if self.block_size else self.copies)


@dataclass(frozen=True, slots=True)
class Cache:
    """The KV pool's layout. A block of any group takes a page of each layer that the widest group has.

    slot_bytes: key and value of one token in one attention layer; state_bytes: the states of one linear layer.
    block_bytes: of one block of the pool. groups: layers of each. drafts: groups of a second model's layers
    that are cached apart.
    """

    cache_dtype: str
    slot_bytes: int
    state_bytes: int
    block_bytes: int
    groups: tuple[int, ...]
    attention: Groups
    states: Groups
    drafts: Groups

    def request_blocks(self, length: int) -> int:
        """v1/core/kv_cache_utils.py, get_max_concurrency_for_kv_cache_config."""
        return sum(kind.request_blocks(length) for kind in (self.attention, self.states, self.drafts))

    def blocks(self, pool: int) -> int:
        """Blocks of a pool of so many bytes: get_kv_cache_config_from_groups."""
        return max(pool, 0) // self.block_bytes

    def requests(self, blocks: int, length: int) -> int:
        """Requests of `length` tokens at once. One block of every pool stays unused (v1/core/block_pool.py)."""
        return max(blocks - 1, 0) // self.request_blocks(length)

    def longest(self, blocks: int) -> int:
        """Tokens of the longest request that fits alone."""
        left = blocks - 1 - self.states.request_blocks(0)
        found = max(left, 0) // len(self.attention.sizes) * self.attention.block_size
        while found > 0 and self.request_blocks(found) > blocks - 1:
            found -= self.attention.block_size
        return found

    def capacity(self, blocks: int, length: int) -> tuple[int, float]:
        """What vLLM logs as `KV cache size: N tokens, Maximum concurrency for <length> tokens per request: X`.

        get_kv_cache_capacity. The tokens are the concurrency times the length, so another length gives another size.
        """
        concurrency = blocks / self.request_blocks(length)
        return int(concurrency * length), concurrency


def lay_out(geometry: Geometry, settings: Settings, cache_dtype: str | None = None) -> Cache:
    """The pool of one GPU, or of the CPU. cache_dtype: instead of the settings' own, to compare formats."""
    own = geometry.shard(settings.ranks)
    cache_dtype = cache_dtype or settings.cache_dtype
    slot, state = slot_bytes(own, cache_dtype), state_bytes(own, settings)
    block = draft_block = block_size(settings, cache_dtype, slot, state)
    attention, apart, page = geometry.attention + settings.draft_layers, 0, block * slot
    if drafter := settings.drafter and settings.drafter.shard(settings.ranks):
        draft_slot, apart = slot_bytes(drafter, cache_dtype), drafter.attention
        if draft_slot == slot:  # cached with the model's own
            attention, apart = attention + apart, 0
        # unify_kv_cache_spec_page_size: the smaller page gets more tokens, or stays in part empty.
        page = max(page, block * draft_slot)
        draft_block *= max(1, slot // draft_slot if slot % draft_slot == 0 else 1)
        block *= max(1, draft_slot // slot if draft_slot % slot == 0 else 1)
    sizes = group_sizes(attention, geometry.linear, apart)
    groups = tuple(size for kind in sizes for size in kind)
    # One state is running. "align" (prefix caching) keeps a second, and a third where a prefill stores one on its way;
    # each drafted token has its own: MambaSpec.
    copies = 1 + settings.prefix_caching + settings.checkpoints + settings.draft_tokens
    return Cache(
        cache_dtype=cache_dtype,
        slot_bytes=slot,
        state_bytes=state,
        block_bytes=page * max(groups),
        groups=groups,
        attention=Groups(sizes[0], block),
        states=Groups(sizes[1], copies=copies),
        drafts=Groups(sizes[2], draft_block),
    )


def slot_bytes(geometry: Geometry, cache_dtype: str) -> int:
    """Keys and values of one token in one layer.

    v1/kv_cache_interface.py, AttentionSpec; for TurboQuant layers/quantization/turboquant/config.py: a key of 3 or 4
    bits has a float16 norm, one of 8 bits nothing; a value has a float16 scale and zero; the sum is made even.
    """
    key, value = (math.ceil(geometry.head_dim * bits / 8) for bits in CACHE_BITS[cache_dtype])
    if cache_dtype in PACKED:
        key, value = key + (0 if CACHE_BITS[cache_dtype][0] == 8 else 2), value + 4
    return geometry.kv_heads * (key + value + (key + value) % 2)


def state_bytes(geometry: Geometry, settings: Settings) -> int:
    """Convolution's and recurrent state of one linear layer.

    layers/mamba/mamba_utils.py, gated_delta_net_state_shape: the convolution keeps its last inputs, one more for each
    drafted token.
    """
    inputs = (geometry.conv_kernel - 1 + settings.draft_tokens) * geometry.conv_width
    recurrent = geometry.value_heads * geometry.value_dim * geometry.key_dim
    return inputs * DTYPE_BYTES[settings.dtype] + recurrent * DTYPE_BYTES[settings.ssm_dtype]


def block_size(settings: Settings, cache_dtype: str, slot: int, state: int) -> int:
    """Tokens of an attention block: large enough that its page holds a linear layer's state.

    platforms/interface.py, _align_hybrid_block_size: in steps of the block size that was asked for, or of the
    platform's, and always a multiple of what the kernel takes.
    """
    kernel = int(RULES["packed_block" if cache_dtype in PACKED else "kernel_block"][settings.platform])
    asked = settings.block_size or max(RULES["block"][settings.platform], kernel)
    if not state:
        return asked
    step = math.lcm(max(kernel, asked), 64 if settings.checkpoints else 1)
    wanted = step * -(-state // (step * slot))
    return max(asked, kernel * -(-wanted // kernel))


def group_sizes(*kinds: int) -> list[tuple[int, ...]]:
    """Layers of each group of these kinds of layers: dealt out like cards.

    v1/core/kv_cache_utils.py, _get_kv_cache_groups_uniform_page_size: groups as large as the rarest kind, or as the
    most frequent one if it is less than one and a half times as frequent.
    """
    few, many = min(filter(None, kinds)), max(kinds)
    size = many if many < few * 1.5 else few
    counts = [(layers, -(-layers // size)) for layers in kinds]
    return [tuple(len(range(index, layers, count)) for index in range(count)) for layers, count in counts]
