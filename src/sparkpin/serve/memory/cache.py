"""How vLLM 0.32 cuts the KV pool into blocks: what a request of a length takes, and what the log will say.

Each rule names the file of vLLM 0.32.0 that it was read in. A test runs vLLM's own code in the image on the
same settings and wants the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from sparkpin.serve.memory.geometry import DTYPE_BYTES, ONE_BYTE, TURBOQUANT, Geometry
from sparkpin.serve.memory.settings import Settings

FORMATS = ("bfloat16", "fp8", *TURBOQUANT)
"""What a plan compares."""

DEFAULT_BLOCK: Mapping[str, int] = {"cpu": 128, "cuda": 16}  # platforms/cpu.py; config/cache.py
KERNEL_BLOCK: Mapping[str, int] = {"cpu": 32, "cuda": 16}  # v1/attention/backends: cpu_attn, flash_attn, flashinfer
PACKED_BLOCK: Mapping[str, int] = {"cpu": 16, "cuda": 128}  # mods/turboquant: its backends for these platforms


@dataclass(frozen=True, slots=True)
class DraftGroups:
    """Of a second model's layers of one kind. sizes: layers of each group; block_size: tokens of a block; window: what
    a request holds at most, 0 for all of it."""

    sizes: tuple[int, ...]
    block_size: int
    window: int

    def request_blocks(self, length: int) -> int:
        """v1/kv_cache_interface.py, SlidingWindowSpec: one more, since a window need not begin with a block."""
        held = min(length, self.window) if self.window else length
        return len(self.sizes) * (-(-held // self.block_size) + (self.window > 0))


@dataclass(frozen=True, slots=True)
class Cache:
    """The KV pool's layout. A block of any group takes `page_bytes` of each layer that the widest group has.

    slot_bytes: key and value of one token in one attention layer; state_bytes: conv and recurrent state of one linear
    layer, conv_bytes and ssm_bytes its parts. groups: layers of each group, attention's first; state_blocks: that one
    request holds in each of the state groups, whatever its length. padding: layers' worth of each block that
    nothing uses, summed over the groups. drafts: groups of a second model's layers that are cached apart.
    """

    cache_dtype: str
    slot_bytes: int
    conv_bytes: int
    ssm_bytes: int
    block_size: int
    page_bytes: int
    attention_groups: tuple[int, ...]
    state_groups: tuple[int, ...]
    state_blocks: int
    drafts: tuple[DraftGroups, ...] = ()

    @property
    def groups(self) -> tuple[int, ...]:
        return (*self.attention_groups, *self.state_groups, *(size for one in self.drafts for size in one.sizes))

    @property
    def state_bytes(self) -> int:
        return self.conv_bytes + self.ssm_bytes

    @property
    def group_size(self) -> int:
        return max(self.groups)

    @property
    def padding(self) -> int:
        return len(self.groups) * self.group_size - sum(self.groups)

    @property
    def block_bytes(self) -> int:
        """Of one block of the pool."""
        return self.group_size * self.page_bytes

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token in all attention layers, without any rounding."""
        return self.slot_bytes * sum(self.attention_groups)

    @property
    def states_bytes(self) -> int:
        """What the linear layers hold for one request, without any rounding."""
        return self.state_bytes * sum(self.state_groups) * self.state_blocks

    def request_blocks(self, length: int) -> int:
        """Blocks of a request of `length` tokens.

        v1/core/kv_cache_utils.py, get_max_concurrency_for_kv_cache_config; v1/kv_cache_interface.py.
        """
        states = len(self.state_groups) * self.state_blocks
        drafted = sum(one.request_blocks(length) for one in self.drafts)
        return len(self.attention_groups) * -(-length // self.block_size) + states + drafted

    def blocks(self, pool: int) -> int:
        """Blocks of a pool of so many bytes: get_kv_cache_config_from_groups."""
        return max(pool, 0) // self.block_bytes

    def requests(self, blocks: int, length: int) -> int:
        """Requests of `length` tokens at once. One block of every pool stays unused (v1/core/block_pool.py)."""
        return max(blocks - 1, 0) // self.request_blocks(length)

    def longest(self, blocks: int) -> int:
        """Tokens of the longest request that fits alone."""
        left = blocks - 1 - len(self.state_groups) * self.state_blocks
        found = max(left, 0) // len(self.attention_groups) * self.block_size
        while found > 0 and self.drafts and self.request_blocks(found) > blocks - 1:
            found -= self.block_size
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
    slot = own.kv_heads * slot_bytes(cache_dtype, own.head_dim)
    conv, ssm = state_bytes(own, settings)
    block = block_size(settings, cache_dtype, slot, conv + ssm)
    attention = geometry.attention + settings.draft_layers
    drafts, page = [], block * slot
    if drafter := settings.drafter and settings.drafter.shard(settings.ranks):
        draft_slot = drafter.kv_heads * slot_bytes(cache_dtype, drafter.head_dim)
        full = drafter.attention - drafter.sliding
        if draft_slot == slot:  # cached with the model's own
            attention, full = attention + full, 0
        # unify_kv_cache_spec_page_size: the smaller page gets more tokens, or stays in part empty.
        page = max(page, block * draft_slot)
        draft_block = block * max(1, slot // draft_slot if slot % draft_slot == 0 else 1)
        if draft_slot > slot and draft_slot % slot == 0:
            block *= draft_slot // slot
        # What is scheduled and not settled counts with the window: as many tokens as a step has.
        window = drafter.window - 1 + settings.max_num_batched_tokens
        drafts = [(n, draft_block, held) for n, held in ((full, 0), (drafter.sliding, window)) if n]
    counts = group_counts(attention, geometry.linear, *(layers for layers, *_ in drafts))
    # One state is running. "align" (prefix caching) keeps a second, and a third where a prefill stores one on its way;
    # each drafted token has its own: MambaSpec.
    states = 1 + settings.prefix_caching + settings.checkpoints + settings.draft_tokens
    return Cache(
        cache_dtype=cache_dtype,
        slot_bytes=slot,
        conv_bytes=conv,
        ssm_bytes=ssm,
        block_size=block,
        page_bytes=page,
        attention_groups=split(attention, counts[0]),
        state_groups=split(geometry.linear, counts[1]),
        state_blocks=states if geometry.linear else 0,
        drafts=tuple(
            DraftGroups(split(layers, groups), tokens, window)
            for (layers, tokens, window), groups in zip(drafts, counts[2:], strict=True)
        ),
    )


def slot_bytes(cache_dtype: str, head_dim: int) -> int:
    """Key and value of one token and KV head.

    v1/kv_cache_interface.py, AttentionSpec; for TurboQuant layers/quantization/turboquant/config.py: a key of 3 or 4
    bits has a float16 norm, one of 8 bits nothing; a value has a float16 scale and zero; the sum is made even.
    """
    if cache_dtype in DTYPE_BYTES:
        return 2 * head_dim * DTYPE_BYTES[cache_dtype]
    if cache_dtype in ONE_BYTE:
        return 2 * head_dim
    key_bits, value_bits = TURBOQUANT[cache_dtype]
    key = math.ceil(head_dim * key_bits / 8) + (0 if key_bits == 8 else 2)
    value = math.ceil(head_dim * value_bits / 8) + 4
    return key + value + (key + value) % 2


def state_bytes(geometry: Geometry, settings: Settings) -> tuple[int, int]:
    """Convolution's and recurrent state of one linear layer.

    layers/mamba/mamba_utils.py, gated_delta_net_state_shape: the convolution keeps its last inputs, one more for each
    drafted token.
    """
    if not geometry.linear:
        return 0, 0
    inputs = geometry.conv_kernel - 1 + settings.draft_tokens
    conv = inputs * geometry.conv_width * DTYPE_BYTES[settings.conv_dtype]
    ssm = geometry.value_heads * geometry.value_dim * geometry.key_dim * DTYPE_BYTES[settings.ssm_dtype]
    return conv, ssm


def block_size(settings: Settings, cache_dtype: str, slot: int, state: int) -> int:
    """Tokens of an attention block: large enough that its page holds a linear layer's state.

    platforms/interface.py, _align_hybrid_block_size: in steps of the block size that was asked for, or of the
    platform's, and always a multiple of what the kernel takes.
    """
    kernel = (PACKED_BLOCK if cache_dtype in TURBOQUANT else KERNEL_BLOCK)[settings.platform]
    asked = settings.block_size or max(DEFAULT_BLOCK[settings.platform], kernel)
    if not state:
        return asked
    step = math.lcm(max(kernel, asked), 64 if settings.checkpoints else 1)
    wanted = step * -(-state // (step * slot))
    return max(asked, kernel * -(-wanted // kernel))


def group_counts(attention: int, linear: int, *drafts: int) -> tuple[int, ...]:
    """Groups of attention and of linear layers, and of each kind of a second model's.

    v1/core/kv_cache_utils.py, _get_kv_cache_groups_uniform_page_size: groups as large as the rarest kind, or as the
    most frequent one if it is less than one and a half times as frequent.
    """
    kinds = (attention, linear, *drafts)
    few, many = min(filter(None, kinds)), max(kinds)
    size = many if many < few * 1.5 else few
    return tuple(-(-layers // size) for layers in kinds)


def split(layers: int, groups: int) -> tuple[int, ...]:
    """Layers of each group: dealt out like cards."""
    return tuple(len(range(index, layers, groups)) for index in range(groups))
