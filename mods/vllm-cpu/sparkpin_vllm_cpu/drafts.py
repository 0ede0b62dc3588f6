"""Linear attention over drafts of unequal length on vLLM 0.32.0's CPU platform.

A grammar may leave a request fewer drafts than ``num_speculative_tokens``, and the end of the context, too. After such
a step ``_spec_forward`` keeps too much of the convolution's history (``state_len - q_i`` columns; Triton's
``causal_conv1d_update`` keeps ``width - 2``). If all was accepted before, so many are not there, and the engine ends:
"The size of tensor a (5) must match the size of tensor b (4)"; else the next step reads inputs of rejected drafts. On
CPUs with AMX it does so only where lengths differ; of equal ones its C++ kernel was not tried.

Here each short draft is filled up with copies of its last token, whose outputs are dropped. What they leave lies behind
the last token that can be accepted, as a rejected draft's does: no later step reads it. No upstream issue was found.
May go with the first vLLM in which ``test_vllm_still_needs_full_drafts`` fails.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from sparkpin_modkit import check_signature


def install() -> None:
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    original = gdn_attention._spec_forward
    check_signature(
        original,
        "layer, attn_metadata_i, mixed_qkv_spec, b_spec, a_spec, conv_buf, ssm_state, width, state_len",
    )

    @functools.wraps(original)
    def spec_forward(
        layer: Any,
        attn_metadata_i: Any,
        mixed_qkv_spec: torch.Tensor,
        b_spec: torch.Tensor,
        a_spec: torch.Tensor,
        conv_buf: torch.Tensor,
        ssm_state: torch.Tensor,
        width: int,
        state_len: int,
    ) -> Any:
        starts = attn_metadata_i.spec_query_start_loc[: attn_metadata_i.num_spec_decodes + 1]
        rows, real = filled(starts, state_len - width + 2)
        metadata = dataclasses.replace(
            attn_metadata_i, spec_query_start_loc=torch.arange(len(starts), dtype=starts.dtype) * rows.shape[1]
        )
        tokens = (part[rows.flatten()] for part in (mixed_qkv_spec, b_spec, a_spec))
        return original(layer, metadata, *tokens, conv_buf, ssm_state, width, state_len)[real.flatten()]

    gdn_attention._spec_forward = spec_forward


def filled(starts: torch.Tensor, full: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that give each request `full` tokens, the last one again where it has fewer.

    Args:
        starts: ``[requests + 1]``, integers, cumulative number of tokens; each request has 1 to `full`.

    Returns:
        rows: ``[requests, full]``, where in the batch each token is read; real: the same shape, False for a copy.
    """
    steps, lengths = torch.arange(full), starts.diff().unsqueeze(1)
    return starts[:-1].unsqueeze(1) + torch.minimum(steps, lengths - 1), steps < lengths
