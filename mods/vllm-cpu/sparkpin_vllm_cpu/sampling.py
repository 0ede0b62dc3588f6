"""Sampling with speculative decoding on vLLM 0.32.0's CPU platform: two functions that end the engine otherwise.

``_expand_kernel_impl`` spreads temperature (float32), top_k (int32) and top_p (float32) over a request's drafted
tokens. It hands them to a C++ operator that only knows int64, and what that writes is a converted copy: the caller's
tensor stays uninitialised, so that each request that is not greedy is sampled with random parameters or fails with
"index ... is out of bounds". The conversion would also cut a temperature of 0.7 to 0. Upstream:
vllm-project/vllm#55005, with a fix proposed in #55006; not in 0.32.0.

``apply_top_k_only`` asks for the maximum of an empty tensor in a step without drafts (a request's last token may have
none) when there is a top_k and no top_p. No upstream issue was found.

Each may go with the first vLLM in which its ``test_vllm_still_needs_...`` fails.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from sparkpin_modkit import check_signature


def install() -> None:
    """Replace both. Call it before vLLM's worker registers its stand-ins for Triton kernels, as plugins are."""
    from vllm.utils import cpu_triton_utils
    from vllm.v1.sample.ops import topk_topp_sampler

    top_k_only = topk_topp_sampler.apply_top_k_only
    check_signature(
        cpu_triton_utils._expand_kernel_impl,
        "output, input_val, cu_num_tokens, replace_from, replace_to, MAX_NUM_TOKENS",
    )
    check_signature(top_k_only, "logits, k")

    @functools.wraps(top_k_only)
    def apply_top_k_only(logits: torch.Tensor, k: torch.Tensor) -> Any:
        return top_k_only(logits, k) if len(logits) else logits

    cpu_triton_utils._expand_kernel_impl = expand
    topk_topp_sampler.apply_top_k_only = apply_top_k_only


def expand(
    output: torch.Tensor,
    input_val: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: Any = None,
) -> None:
    """Write each request's value to all of its tokens, as vLLM's Triton kernel ``expand_kernel`` does.

    Args:
        output: ``[at least cu_num_tokens[-1]]``; filled in place, what lies beyond the last token is left.
        input_val: ``[requests]``, of any dtype; cast to that of `output` after the replacement.
        cu_num_tokens: ``[requests]``, cumulative number of tokens, of any integer dtype.
        replace_from, replace_to: a value equal to the first becomes the second.
        MAX_NUM_TOKENS: the Triton kernel's block size, unused.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = input_val.masked_fill(input_val == replace_from, replace_to)
    expanded = values.repeat_interleave(counts)
    output[: len(expanded)] = expanded
