"""Which tile sizes the kernel takes: data per architecture in tuned.json, chosen once at load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from sparkpin_modkit.tuned import tuned_entries

OLDEST = 80
"""Compute capability, times ten: the kernel's bfloat16 arithmetic needs 8.0."""


@dataclass(frozen=True)
class Tuned:
    """block_b tokens, block_v rows of the head and block_k columns make a tile; stages tiles are loaded ahead.

    bits: 8 is `kernel.int8_head`; 4 is `kernel.int4_head`, where block_k is of bytes.
    """

    block_b: int
    block_v: int
    block_k: int
    warps: int
    stages: int
    bits: int = 8

    @property
    def options(self) -> dict[str, int]:
        """What a kernel is compiled with."""
        sizes = {"BLOCK_B": self.block_b, "BLOCK_V": self.block_v, "BLOCK_K": self.block_k}
        return {**sizes, "num_warps": self.warps, "num_stages": self.stages}


def tuned_for(architecture: int, bits: int = 8) -> Mapping[int, Tuned]:
    """Tokens -> what to use for up to that many, ascending.

    Args:
        architecture: compute capability times ten, 121 for 12.1.
        bits: of a weight.

    Raises:
        ModError: it is older than OLDEST.
    """
    found = (Tuned(**entry) for entry in tuned_entries("int8-lm-head", "sparkpin_int8_lm_head", architecture, OLDEST))
    return MappingProxyType({entry.block_b: entry for entry in found if entry.bits == bits})


def tile_for(tokens: int, tuned: Mapping[int, Tuned]) -> Tuned:
    """The smallest tile that holds `tokens`; the largest of all where none does, which then is taken several times."""
    return tuned[min((size for size in tuned if size >= tokens), default=max(tuned))]
