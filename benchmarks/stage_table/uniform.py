"""Uniform routing, imposed: every token goes to experts drawn at random, whatever the router says.

vLLM's own simulator (VLLM_MOE_ROUTING_SIMULATION_STRATEGY=uniform_random) would do in CUDA graphs, too, but launches
about five small kernels a layer in place of one, which tells in a step of 7 ms. This is one kernel in place of one,
without a state: the draw is a hash of the token's router logits, so a replayed graph draws anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

LOGGED = 64
"""Tokens of a step whose experts are kept, of the layer that ran last."""


@triton.jit
def draw(logits, weights, ids, log, stride, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr, LOGGED: tl.constexpr):  # type: ignore[no-untyped-def]
    """One token: CHOSEN different experts, a first one and then steps of an odd width, each with the same weight."""
    token = tl.program_id(0)
    place = tl.arange(0, EXPERTS)
    bits = tl.load(logits + token * stride + place).to(tl.float32).to(tl.int32, bitcast=True)
    mixed = tl.xor_sum(bits * (place * 2 + 1), 0).to(tl.uint32, bitcast=True)
    mixed = (mixed ^ (mixed >> 16)) * 73244475
    mixed = (mixed ^ (mixed >> 16)) * 73244475
    mixed = (mixed ^ (mixed >> 16)).to(tl.int32, bitcast=True)
    first = mixed & (EXPERTS - 1)
    width = ((mixed >> 12) & (EXPERTS // 2 - 1)) * 2 + 1
    number = tl.arange(0, CHOSEN)
    chosen = (first + number * width) & (EXPERTS - 1)
    tl.store(ids + token * CHOSEN + number, chosen)
    tl.store(weights + token * CHOSEN + number, tl.full((CHOSEN,), 1.0 / CHOSEN, tl.float32))
    tl.store(log + token * CHOSEN + number, chosen, mask=(number >= 0) & (token < LOGGED))


class Uniform:
    """In place of vLLM's `topk_softmax`, which stays in `own`. log: [LOGGED, experts a token], of the last layer."""

    def __init__(self, own: Callable[..., None]) -> None:
        self.own = own
        self.log: torch.Tensor | None = None

    def __call__(
        self, weights: torch.Tensor, ids: torch.Tensor, _: torch.Tensor, logits: torch.Tensor, *__: Any, **___: Any
    ) -> None:
        tokens, chosen = ids.shape
        experts = logits.shape[-1]
        if experts & (experts - 1) or chosen & (chosen - 1) or logits.stride(-1) != 1:
            raise ValueError(f"{chosen} of {experts} experts, strides {logits.stride()}: want powers of 2, whole rows")
        if self.log is None:  # in vLLM's first run, before anything is captured
            self.log = torch.zeros(LOGGED, chosen, dtype=torch.int32, device=ids.device)
        if tokens:
            draw[(tokens,)](
                logits, weights, ids, self.log, logits.stride(0), EXPERTS=experts, CHOSEN=chosen, LOGGED=LOGGED
            )


def install() -> Uniform:
    """Into vLLM: experts in INT4 and in BF16 ask `topk_softmax`, in an operator that torch.compile does not open."""
    import vllm._custom_ops as ops

    uniform = Uniform(ops.topk_softmax)
    ops.topk_softmax = uniform
    return uniform
