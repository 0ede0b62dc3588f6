"""Which tile sizes the kernel takes: data per architecture in tuned.json, chosen once at load."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from types import MappingProxyType

from sparkpin_modkit import ModError

OLDEST = 80
"""Compute capability, times ten: the kernel's bfloat16 arithmetic needs 8.0."""


@dataclass(frozen=True)
class Tuned:
    """block_b tokens, block_v rows of the head and block_k columns make a tile; stages tiles are loaded ahead."""

    block_b: int
    block_v: int
    block_k: int
    warps: int
    stages: int


def tuned_for(architecture: int) -> Mapping[int, Tuned]:
    """Tokens in a tile -> what to use for that many, ascending.

    Args:
        architecture: compute capability times ten, 121 for 12.1.

    Raises:
        ModError: it is older than OLDEST.
    """
    if architecture < OLDEST:
        raise ModError(
            f"int8-lm-head: compute capability {architecture / 10} is too old, wanted {OLDEST / 10} or newer; "
            "set SPARKPIN_MOD_INT8_LM_HEAD=0"
        )
    data = json.loads(resources.files("sparkpin_int8_lm_head").joinpath("tuned.json").read_text())
    name = str(architecture) if str(architecture) in data["tuned"] else data["others"]
    found = (Tuned(**entry) for entry in data["tuned"][name])
    return MappingProxyType({entry.block_b: entry for entry in sorted(found, key=lambda entry: entry.block_b)})


def tile_for(tokens: int, tuned: Mapping[int, Tuned]) -> Tuned:
    """The smallest tile that holds `tokens`; the largest of all where none does."""
    return tuned[min((size for size in tuned if size >= tokens), default=max(tuned))]
