"""Which tiles the attention kernel takes: data per architecture in tuned.json, chosen once."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sparkpin_modkit.tuned import tuned_entries

from sparkpin_turboquant.formats import Format
from sparkpin_turboquant.kernel import Variant

MOST_ROWS = 64
"""Query tokens x heads that a block takes: more need more registers than there are."""
OLDEST = 80
"""Compute capability, times ten: products of bfloat16 (mma.sync) need 8.0."""


@dataclass(frozen=True)
class Tuned:
    """Blocks of `warps`, `blocks` of them on a multiprocessor; head size 256.

    Smaller heads take fewer warps and more blocks. `overlap`: the merging kernel is launched before the one before it
    has ended (from SM90 on). `few`: new tokens after a history up to which prefill is decode, in pieces of `piece_of`
    tokens. `joined`: of more new tokens, up to which they and the history are attended to at once, see
    `prefill.Joined`; 0: never.
    """

    warps: int
    blocks: int
    overlap: bool = False
    few: int = 0
    joined: int = 0


def tuned_for(architecture: int) -> Tuned:
    """architecture: compute capability times ten, 121 for 12.1. Raises ModError if too old."""
    [entry] = tuned_entries("turboquant", "sparkpin_turboquant", architecture, OLDEST)
    found = Tuned(**entry)
    return replace(found, overlap=found.overlap and architecture >= 90)


def splits_of(most_queries: int, group: int) -> int:
    """In how many parts the query heads of a KV head are taken, so that a part makes at most MOST_ROWS rows."""
    for splits in range(1, group + 1):
        if group % splits == 0 and most_queries * group // splits <= MOST_ROWS:
            return splits
    raise ValueError(f"turboquant: {most_queries} query tokens of a sequence in one call, expected at most {MOST_ROWS}")


def piece_of(group: int) -> int:
    """How many query tokens fill a block, for that many query heads of a KV head."""
    return max(1, MOST_ROWS // group)


def variant_for(tuned: Tuned, format: Format, head_dim: int, rows: int, wide: bool = False) -> Variant:
    """What is launched for up to that many rows: query tokens x heads of a KV head or of a part. wide: of 32 bits."""
    warps = min(tuned.warps, head_dim // 32)
    return Variant(
        head_dim=head_dim,
        key_bits=format.key_bits,
        rows=-(-rows // 16),
        warps=warps,
        blocks=tuned.blocks * (tuned.warps // warps),
        wide=wide,
    )


def programs_of(variant: Variant, processors: int, heads: int) -> int:
    """How many blocks share the tiles of a head. Those of all heads are at work at a time if there are few heads."""
    return max(1, variant.blocks * processors // heads)
