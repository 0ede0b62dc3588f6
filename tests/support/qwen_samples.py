"""Made-up listings of Qwen3.5-MoE pairs in the published geometry (sparkpin.checkpoint.published), and a small one."""

from __future__ import annotations

import functools
from collections import Counter

from sparkpin.checkpoint.plan import CheckpointPlan, all_steps, make_plan
from sparkpin.checkpoint.published import (  # noqa: F401
    EXTRA,
    G35B,
    G122B,
    MULTIMODAL,
    TEXT,
    Geometry,
    config_of,
    fp8_listing,
    int4_files,
    int4_listing,
)  # fmt: skip
from sparkpin.checkpoint.repository import Listing, header_of
from sparkpin.pins.schema import ModelPin

TOY = Geometry(4, 256, 2, 128, heads=4, kv_heads=2, key_heads=2, value_heads=8, head_dim=64, vocabulary=1024)


@functools.cache
def listings(g: Geometry, body: str = MULTIMODAL, *, listed: bool = True) -> dict[str, Listing]:
    return {"int4": int4_listing(g, body=body, listed=listed), "fp8": fp8_listing(g, body=body)}


def plan_of(pin: ModelPin, pair: dict[str, Listing]) -> CheckpointPlan:
    return make_plan(pair, pin, all_steps(pin))


def tensors_of(listing: Listing) -> dict[str, str]:
    """name -> file"""
    return {name: file for file in listing.headers for name in header_of(listing, file).tensors}


def counts(plan: CheckpointPlan) -> Counter[str]:
    found: Counter[str] = Counter()
    for row in plan.rows:
        found[row.verb] += row.tensors
    return found
