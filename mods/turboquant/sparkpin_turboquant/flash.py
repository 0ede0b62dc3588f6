"""FlashAttention as vLLM carries it, for `prefill`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from vllm.v1.attention.backends.fa_utils import get_flash_attn_version, is_fa_version_supported
from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func


def flash_attention(head_size: int, scale: float, version: int | None = None) -> Any:
    """`prefill.Attend` on this GPU. Raises NotImplementedError when vLLM has no FlashAttention for it.

    version: for tests; a Spark has 2.
    """
    # vLLM holds a server with this cache type to version 2, for the sake of layers that keep another type.
    version = version or (3 if is_fa_version_supported(3) else get_flash_attn_version(head_size=head_size))
    if version is None:
        raise NotImplementedError(f"turboquant: vLLM has no FlashAttention for head_size {head_size} on this GPU")
    return partial(_attend, scale, version)


def _attend(
    scale: float,
    version: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    most_queries: int,
    most_keys: int,
    causal: bool,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    found, logs = flash_attn_varlen_func(
        query,
        key,
        value,
        max_seqlen_q=most_queries,
        cu_seqlens_q=query_starts,
        max_seqlen_k=most_keys,
        cu_seqlens_k=key_starts,
        softmax_scale=scale,
        causal=causal,
        return_softmax_lse=True,
        out=out,
        fa_version=version,
    )[:2]
    return found, logs
