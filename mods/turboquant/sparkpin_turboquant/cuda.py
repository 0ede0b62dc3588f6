"""The GPU's side as functions of tensors: store new tokens, attend over the cache. May be captured in CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from sparkpin_turboquant import driver, rotation
from sparkpin_turboquant.formats import GROUP, HEAD_DIMS, Format, layout
from sparkpin_turboquant.kernel import Access, Args, At, Store
from sparkpin_turboquant.tuned import Tuned, programs_of, splits_of, variant_for

LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Cache:
    """A layer's cache and how it is read.

    Args:
        data: uint8; block i starts at byte ``i * block_bytes``, its content is laid out as `formats.layout` says.
        block_bytes: bytes from block to block, a multiple of 16.
        block_size: tokens of a block.
        slot: bytes reserved for a token and KV head.
    """

    data: torch.Tensor
    format: Format
    heads: int
    head_dim: int
    block_size: int
    slot: int
    block_bytes: int

    def __post_init__(self) -> None:
        rotation.check_head_dim(self.head_dim)
        if self.head_dim not in HEAD_DIMS:
            raise ValueError(f"turboquant: head_dim {self.head_dim} on a GPU, expected 64, 128 or 256")
        if self.block_bytes % 16 or self.data.data_ptr() % 16:
            raise ValueError(f"turboquant: blocks {self.block_bytes} bytes apart, expected a multiple of 16")
        layout(self.format, self.head_dim, self.block_size, self.slot)


@cache
def signs(head_dim: int, device: torch.device) -> torch.Tensor:
    return rotation.signs(head_dim).to(device)


def access_of(cache_: Cache, dtype: torch.dtype) -> Access:
    """The compilation of cache.cu for rows of a type."""
    return Access(cache_.head_dim, cache_.format.key_bits, dtype == torch.float32)


def at_of(cache_: Cache) -> At:
    at = layout(cache_.format, cache_.head_dim, cache_.block_size, cache_.slot)
    return At(cache_.block_bytes, cache_.block_size * cache_.slot, at.values, at.norms)


def store_tokens(key: torch.Tensor, value: torch.Tensor, cache_: Cache, slots: torch.Tensor) -> None:
    """Encode ``key``, ``value`` ``[>= T, heads, D]`` into the slots ``[T]`` int64 (negative: padding)."""
    tokens = slots.shape[0]
    if not tokens:
        return
    check_rows(key, value)
    if slots.dtype != torch.int64:
        raise ValueError(f"turboquant: slots of {slots.dtype}, expected int64")
    access = access_of(cache_, key.dtype)
    args = Store(
        key=key.data_ptr(),
        value=value.data_ptr(),
        cache=cache_.data.data_ptr(),
        slots=slots.data_ptr(),
        signs=signs(cache_.head_dim, key.device).data_ptr(),
        key_stride=key.stride(0),
        value_stride=value.stride(0),
        at=at_of(cache_),
        tokens=tokens,
        heads=cache_.heads,
        block_size=cache_.block_size,
        bfloat=key.dtype == torch.bfloat16,
    )
    on_gpu = driver.loaded(access, key.device.index)
    on_gpu.launch(access.by_rows("store", 2 * cache_.heads * tokens), args, driver.stream_of(key.device))


def check_rows(*tensors: torch.Tensor) -> None:
    """``[T, heads, D]`` whose rows start at multiples of 16 bytes, heads one after another; else ValueError."""
    for x in tensors:
        apart = x.shape[1] > 1 and x.stride(1) != x.shape[2]
        if apart or x.stride(2) != 1 or x.data_ptr() % 16 or x.stride(0) * x.element_size() % 16:
            raise ValueError(
                f"turboquant: rows of strides {x.stride()} at {x.data_ptr():#x}, expected heads one after another, at "
                "multiples of 16 bytes"
            )


def prepare(format: Format, head_dim: int, group: int, most_queries: int, tuned: Tuned) -> None:
    """Load on the current GPU what `attend` launches for 1 to `most_queries` tokens of `group` heads of a KV head.

    A CUDA graph may be captured only of what is loaded.
    """
    parts = (queries * group // splits_of(queries, group) for queries in range(1, most_queries + 1))
    for variant in {variant_for(tuned, format, head_dim, rows) for rows in parts}:
        driver.loaded(variant, torch.cuda.current_device())


def arguments(
    part: torch.Tensor,
    logs: torch.Tensor,
    query: torch.Tensor,
    out: torch.Tensor,
    signs: torch.Tensor,
    cache_: Cache,
    table: torch.Tensor,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    owners: torch.Tensor | None,
    scale: float,
    programs: int,
    splits: int,
) -> Args:
    """What attend.cu is told. The tensors must outlive it."""
    at = at_of(cache_)
    block_groups = cache_.block_size // GROUP
    group = query.shape[1] // (cache_.heads * splits)
    return Args(
        part=part.data_ptr(),
        logs=logs.data_ptr(),
        q=query.data_ptr(),
        out=out.data_ptr(),
        signs=signs.data_ptr(),
        cache=cache_.data.data_ptr(),
        table=table.data_ptr(),
        lengths=lengths.data_ptr(),
        starts=starts.data_ptr(),
        owners=None if owners is None else owners.data_ptr(),
        q_stride=query.stride(0),
        out_stride=out.stride(0),
        block_bytes=at.block_bytes,
        head_bytes=at.head_bytes,
        values=at.values,
        norms=at.norms,
        scale=scale * LOG2_E,
        heads_share=1 / group,
        sequences=lengths.shape[0],
        programs=programs,
        rows=logs.shape[2],
        group=group,
        splits=splits,
        table_width=table.stride(0),
        block_groups=block_groups,
        block_magic=-(-(2**32) // block_groups) % 2**32,
        bfloat=query.dtype == torch.bfloat16,
    )


def attend(
    query: torch.Tensor,
    cache_: Cache,
    table: torch.Tensor,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    most_queries: int,
    scale: float,
    out: torch.Tensor,
    tuned: Tuned,
    processors: int,
    owners: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of each sequence's last queries over its cache.

    Args:
        query: ``[T, H, D]`` float16 or bfloat16, rows may be strided; H divisible by the cache's heads.
        table: ``[requests, blocks]`` int32.
        lengths: ``[S]`` int32 cached tokens, the queries' own included; query i of q stands at ``length - q + i``.
        starts: ``[S + 1]`` int32, where each sequence's queries start.
        most_queries: no sequence has more; at most MOST_ROWS.
        scale: of the logits.
        out: ``[T, H, D]``, rows may be strided. Rows of no sequence stay as they are.
        processors: multiprocessors to use.
        owners: ``[S]`` int32, each sequence's row of `table`; their own numbers where it is None.
    """
    head_dim, format = cache_.head_dim, cache_.format
    check_rows(query, out)
    sequences = lengths.shape[0]
    splits = splits_of(most_queries, query.shape[1] // cache_.heads)
    heads = cache_.heads * splits
    group = query.shape[1] // heads
    rows = most_queries * group
    variant = variant_for(tuned, format, head_dim, rows, query.dtype == torch.float32)
    programs = programs_of(variant, processors, heads)
    places = programs + sequences
    part = torch.empty(places, heads, rows, head_dim, dtype=torch.float16, device=query.device)
    logs = torch.empty(places, heads, rows, dtype=torch.float32, device=query.device)
    its_signs = signs(head_dim, query.device)
    args = arguments(part, logs, query, out, its_signs, cache_, table, lengths, starts, owners, scale, programs, splits)
    on_gpu, stream = driver.loaded(variant, query.device.index), driver.stream_of(query.device)
    attending, merging = variant.launches(args, heads)
    on_gpu.launch(attending, args, stream)
    on_gpu.launch(merging, args, stream, tuned.overlap)
    return out
