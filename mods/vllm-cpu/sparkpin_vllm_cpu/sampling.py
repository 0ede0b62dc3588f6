"""Per-request sampling parameters, spread over a request's drafted tokens.

vLLM 0.32.0 hands temperature (float32), top_k (int32) and top_p (float32) to a C++ operator that only knows int64. What
the operator writes is a converted copy, so the caller's tensor stays uninitialised: with speculative decoding each
request that is not greedy is sampled with random parameters, or ends the engine with "index ... is out of bounds". The
conversion would also cut a temperature of 0.7 to 0. Known upstream as vllm-project/vllm#55005 (open in 0.32.0; a fix is
proposed in #55006). May go with the first vLLM whose own function passes the tests of this module.
"""

from __future__ import annotations

from typing import Any

import torch
from sparkpin_modkit import check_signature

SIGNATURE = "output, input_val, cu_num_tokens, replace_from, replace_to, MAX_NUM_TOKENS"


def install() -> None:
    """Replace vLLM's ``_expand_kernel_impl`` before the worker registers it in the Triton kernel's place."""
    from vllm.utils import cpu_triton_utils

    check_signature(cpu_triton_utils._expand_kernel_impl, SIGNATURE)
    cpu_triton_utils._expand_kernel_impl = expand


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
