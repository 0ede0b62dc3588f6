"""Drafts of unequal length through vLLM's own linear attention for CPUs, against the same tokens one by one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sparkpin_vllm_cpu import drafts
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

WIDTH, DRAFTS, HEADS, SIZE = 4, 2, 2, 32
FULL = 1 + DRAFTS
DIM = 3 * HEADS * SIZE  # of query, key and value
STATE = WIDTH - 1 + DRAFTS
STEPS = (  # of two requests: tokens, and how many of them are accepted
    ((3, 3), (3, 1)),
    ((1, 1), (3, 2)),
    ((3, 2), (2, 2)),
    ((2, 1), (1, 1)),
    ((2, 2), (2, 1)),
    ((1, 1), (1, 1)),
    ((3, 3), (3, 3)),
)


@pytest.fixture(autouse=True)
def without_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """With AMX vLLM takes a convolution of its own for drafts of equal length, over weights that it has packed."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)


class Layer:
    """What ``_spec_forward`` reads of a layer of linear attention."""

    def __init__(self) -> None:
        made = torch.Generator().manual_seed(1)
        weight = torch.randn(DIM, 1, WIDTH, generator=made).bfloat16()
        self.conv1d = SimpleNamespace(weight=weight, bias=None, _cpu_unpacked_conv_weight=weight.squeeze(1))
        self.activation = "silu"
        self.A_log = torch.randn(HEADS, generator=made)
        self.dt_bias = torch.randn(HEADS, generator=made).bfloat16()

    def rearrange_mixed_qkv(self, mixed: torch.Tensor) -> list[torch.Tensor]:
        return [part.reshape(1, len(mixed), HEADS, SIZE).contiguous() for part in mixed.chunk(3, dim=-1)]


def outputs(steps: Any, garbage: int) -> list[torch.Tensor]:
    """What linear attention gives for the accepted tokens of two texts, step by step; rejected ones are `garbage`."""
    made, wrong = torch.Generator().manual_seed(2), torch.Generator().manual_seed(garbage)
    layer, texts = Layer(), torch.randn(2, 32, DIM + 2 * HEADS, generator=made).bfloat16()
    conv, ssm = torch.randn(6, DIM, STATE, generator=made).bfloat16(), torch.randn(6, HEADS, SIZE, SIZE, generator=made)
    at, accepted, told = [0, 0], [1, 1], []
    for step in steps:
        lengths, counts = [length for length, _ in step], [count for _, count in step]
        tokens = torch.cat([text[here : here + count] for text, here, (_, count) in zip(texts, at, step, strict=True)])
        places = torch.cat([torch.arange(length) < count for length, count in step])
        batch = torch.randn(sum(lengths), DIM + 2 * HEADS, generator=wrong).bfloat16()
        batch[places] = tokens
        metadata = GDNAttentionMetadata(0, 0, 0, 0, len(step), sum(lengths), sum(lengths))
        metadata.spec_query_start_loc = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        metadata.spec_state_indices_tensor = torch.arange(6, dtype=torch.int32).reshape(2, FULL)
        metadata.num_accepted_tokens = torch.tensor(accepted, dtype=torch.int32)
        mixed, b, a = (part.contiguous() for part in batch.split([DIM, HEADS, HEADS], dim=1))
        told.append(gdn_attention._spec_forward(layer, metadata, mixed, b, a, conv, ssm, WIDTH, STATE)[places])
        at, accepted = [here + count for here, count in zip(at, counts, strict=True)], counts
    return told


def full(steps: Any) -> Any:
    return [[(FULL, count) for _, count in step] for step in steps]


def test_short_drafts_give_what_full_ones_give() -> None:
    wanted = outputs(full(STEPS), garbage=3)
    drafts.install()
    for seen, expected in zip(outputs(STEPS, garbage=4), wanted, strict=True):
        assert torch.isfinite(seen).all() and torch.equal(seen, expected)


def test_full_drafts_are_left_as_they_were() -> None:
    wanted = outputs(full(STEPS), garbage=3)
    drafts.install()
    assert all(map(torch.equal, outputs(full(STEPS), garbage=3), wanted))


def test_vllm_still_needs_full_drafts() -> None:
    """When one of these fails, vLLM keeps the right part of the convolution's history: look whether this may go."""
    with pytest.raises(RuntimeError, match=r"size of tensor a \(5\) must match the size of tensor b \(3\)"):
        outputs([((3, 3), (3, 3)), ((1, 1), (3, 3))], garbage=3)
    steps = [((3, 1), (3, 1)), ((2, 2), (3, 3)), ((3, 3), (3, 3))]  # silently wrong: a rejected draft's input is read
    assert not torch.equal(outputs(steps, garbage=3)[-1], outputs(full(steps), garbage=3)[-1])
