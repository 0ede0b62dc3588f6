"""The GPU's side as functions of tensors: store new tokens, attend over the cache. May be captured in CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton

from sparkpin_turboquant import rotation
from sparkpin_turboquant.attend import attend as attend_kernel
from sparkpin_turboquant.formats import Format, layout
from sparkpin_turboquant.transform import constants, merge, rotate, store
from sparkpin_turboquant.tuned import Tuned, columns, entry_for
from sparkpin_turboquant.unpack import INTERPRETED

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
        if self.head_dim < 64 or self.head_dim > 256:
            raise ValueError(f"turboquant: head_dim {self.head_dim} on a GPU, wanted 64, 128 or 256")
        if self.block_bytes % 16 or self.data.data_ptr() % 16:
            raise ValueError(f"turboquant: blocks {self.block_bytes} bytes apart, wanted a multiple of 16")
        layout(self.format, self.head_dim, self.block_size, self.slot)


@cache
def _signs(head_dim: int, device: torch.device) -> torch.Tensor:
    return rotation.signs(head_dim).to(device)


def store_tokens(key: torch.Tensor, value: torch.Tensor, cache_: Cache, slots: torch.Tensor) -> None:
    """Encode ``key``, ``value`` ``[>= T, heads, D]`` into the slots ``[T]`` (negative: padding)."""
    tokens = slots.shape[0]
    if tokens:
        store[(tokens, cache_.heads)](
            key,
            value,
            cache_.data,
            slots,
            _signs(cache_.head_dim, key.device),
            key.stride(0),
            value.stride(0),
            cache_.block_bytes,
            A=cache_.head_dim // 16,
            KEY_BITS=cache_.format.key_bits,
            VALUE_BITS=cache_.format.value_bits,
            BLOCK=cache_.block_size,
            SLOT=cache_.slot,
            num_warps=4,
            **constants(cache_.head_dim),
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
    tuned: tuple[Tuned, ...],
    processors: int,
    owners: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of each sequence's last queries over its cache.

    Args:
        query: ``[T, H, D]``, rows may be strided; H divisible by the cache's heads.
        table: ``[requests, blocks]`` int32.
        lengths: ``[S]`` int32 cached tokens, the queries' own included; query i of q stands at ``length - q + i``.
        starts: ``[S + 1]`` int32, where each sequence's queries start.
        most_queries: no sequence has more; with the query heads of a KV head it makes no more rows than the widest
        tuned entry.
        scale: of the logits.
        out: ``[T, H, D]`` or ``[T, H * D]``, rows may be strided. Rows of no sequence stay as they are.
        processors: multiprocessors to use.
        owners: ``[S]`` int32, each sequence's row of `table`; their own numbers where it is None.
    """
    tokens, all_heads, head_dim = query.shape
    group = all_heads // cache_.heads
    rows = most_queries * group
    sequences = lengths.shape[0]
    entry = entry_for(rows, tuned)
    m0, m1 = columns(rows)
    programs = max(1, entry.programs * processors // cache_.heads)
    signs = _signs(head_dim, query.device)
    rotated = torch.empty(tokens, all_heads, head_dim, dtype=torch.float16, device=query.device)
    part = torch.empty(programs + sequences, cache_.heads, rows, head_dim, dtype=torch.float16, device=query.device)
    logs = torch.empty(programs + sequences, cache_.heads, rows, dtype=torch.float32, device=query.device)
    norm = constants(head_dim)["NORM"]
    shared = {"HEADS": cache_.heads, "GROUP": group, "ROWS": rows, "N": entry.tokens}
    shared["MOST"] = triton.next_power_of_2(max(sequences, 16))
    overlap = {"launch_pdl": True} if entry.overlap else {}
    rotate[(tokens, all_heads)](
        rotated, query, signs, query.stride(0), A=head_dim // 16, NORM=norm, OVERLAP=entry.overlap, num_warps=4
    )
    attend_kernel[(programs, cache_.heads)](
        part,
        logs,
        rotated,
        cache_.data,
        table,
        lengths,
        starts,
        owners,
        scale * LOG2_E,
        sequences,
        programs,
        entry.share,
        cache_.block_bytes,
        table.stride(0),
        M0=m0,
        M1=m1,
        D=head_dim,
        KEY_BITS=cache_.format.key_bits,
        VALUE_BITS=cache_.format.value_bits,
        BLOCK=cache_.block_size,
        SLOT=cache_.slot,
        STAGES=entry.stages,
        OWNERS=owners is not None,
        PAIRS=entry.pairs,
        ASSEMBLY=not INTERPRETED,
        num_warps=entry.warps,
        num_stages=entry.stages,
        maxnreg=entry.registers,
        OVERLAP=entry.overlap,
        **overlap,
        **shared,
    )
    merge[(sequences, rows, cache_.heads)](
        out,
        part,
        logs,
        signs,
        lengths,
        starts,
        sequences,
        programs,
        entry.share,
        out.stride(0),
        A=head_dim // 16,
        LOGS=triton.next_power_of_2(programs),
        AT_ONCE=64,
        NORM=norm,
        OVERLAP=entry.overlap,
        num_warps=8,
        **overlap,
        **shared,
    )
    return out
