"""Prompts of one token for models with linear attention on vLLM 0.32.0's CPU platform.

The convolution's kernel wants the strides ``(1, dim)`` of its input ``[dim, tokens]``. A step of one token has those of
the wider projection that it was cut from: PyTorch holds any stride of a dimension of one element for contiguous, so
vLLM's ``contiguous()`` leaves it. The engine ends with "expect x to be transposed", where the CPU has AVX512-BF16 and
nothing is drafted, or has AMX. No upstream issue was found. May go with the first vLLM in which
``test_vllm_still_needs_strides`` fails.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from sparkpin_modkit import check_signature


def install() -> None:
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    original = gdn_attention._causal_conv1d_fwd_cpu
    check_signature(
        original,
        "x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state, silu_activation, "
        "is_weight_packed",
    )

    @functools.wraps(original)
    def causal_conv1d_fwd_cpu(*, x: torch.Tensor, **others: Any) -> Any:
        return original(x=x.as_strided(x.shape, (1, len(x))) if x.shape[1] == 1 else x, **others)

    gdn_attention._causal_conv1d_fwd_cpu = causal_conv1d_fwd_cpu
