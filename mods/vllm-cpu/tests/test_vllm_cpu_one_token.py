"""A step of one token, cut from a wider projection, through vLLM's convolution."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sparkpin_vllm_cpu import one_token
from torch.nn import functional
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

DIM, WIDTH = 192, 4
CALLED = torch.cpu._is_avx512_bf16_supported()  # elsewhere vLLM takes a convolution in torch


def convolved(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What it gives for the first tokens of a prompt, ``[tokens, DIM]``, and what it should."""
    made = torch.Generator().manual_seed(1)
    weight, states = torch.randn(DIM, WIDTH, generator=made).bfloat16(), torch.zeros(2, WIDTH - 1, DIM).bfloat16()
    inputs = torch.randn(8, 2 * DIM, generator=made).bfloat16()[:tokens, :DIM].contiguous()
    done = gdn_attention._causal_conv1d_fwd_cpu(
        x=inputs.transpose(0, 1),
        weight=weight,
        bias=None,
        conv_states=states.transpose(1, 2),
        query_start_loc=torch.tensor([0, tokens], dtype=torch.int32),
        cache_indices=torch.tensor([1], dtype=torch.int32),
        has_initial_state=torch.tensor([False]),
        silu_activation=True,
        is_weight_packed=False,
    )
    padded = functional.pad(inputs.float().t().unsqueeze(0), (WIDTH - 1, 0))
    wanted = functional.silu(functional.conv1d(padded, weight.float().unsqueeze(1), groups=DIM))
    return done.transpose(0, 1).float(), wanted[0].t()


@pytest.mark.parametrize("tokens", [1, 2, 7] if CALLED else [])
def test_it_is_convolved_as_others_are(tokens: int) -> None:
    one_token.install()
    torch.testing.assert_close(*convolved(tokens), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("needs", [convolved] if CALLED else [])
def test_vllm_still_needs_strides(needs: Callable[[int], object]) -> None:
    """When this fails, vLLM's kernel takes one token as it comes: the override may go."""
    with pytest.raises(RuntimeError, match="expect x to be transposed"):
        needs(1)


def test_only_the_strides_of_one_token_are_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(*, x: torch.Tensor) -> torch.Tensor:
        """Stands for the kernel, which other CPUs lack."""
        return x

    monkeypatch.setattr(one_token, "check_signature", lambda fn, expected: None)
    monkeypatch.setattr(gdn_attention, "_causal_conv1d_fwd_cpu", taken)
    one_token.install()
    wide = torch.arange(12.0).reshape(2, 6)[:, :3]
    seen = gdn_attention._causal_conv1d_fwd_cpu(x=wide[1:].t())
    assert seen.tolist() == [[6.0], [7.0], [8.0]] and seen.stride() == (1, 3)
    assert gdn_attention._causal_conv1d_fwd_cpu(x=wide.t()).stride() == (1, 6)
