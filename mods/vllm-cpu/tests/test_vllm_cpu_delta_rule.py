"""The gated delta rule in chunks, against the rule token by token and against vLLM's operator."""

from __future__ import annotations

from typing import Any

import pytest
import sparkpin_vllm_cpu
import torch
from sparkpin_vllm_cpu import delta_rule
from sparkpin_vllm_cpu.delta_rule import chunk_gated_delta_rule
from vllm import _custom_ops as ops
from vllm_cpu_replaced import STOCK

KEY_HEADS, HEADS, DIM = 2, 4, 128
THEIRS = STOCK["chunk_gated_delta_rule_cpu"]


def inputs(tokens: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(tokens)
    q, k = (torch.randn(1, tokens, KEY_HEADS, DIM, generator=made).bfloat16() for _ in range(2))
    v = torch.randn(1, tokens, HEADS, DIM, generator=made).bfloat16()
    g = -torch.rand(1, tokens, HEADS, generator=made) * 3
    beta = torch.rand(1, tokens, HEADS, generator=made).bfloat16()
    return {"query": q, "key": k, "value": v, "g": g, "beta": beta}


def first_states() -> torch.Tensor:
    return torch.randn(4, HEADS, DIM, DIM, generator=torch.Generator().manual_seed(9)) / 10


def asked(
    rule: Any,
    given: dict[str, torch.Tensor],
    ends: list[int],
    slots: list[int],
    states: torch.Tensor | None = None,
    head_first: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    states = first_states() if states is None else states
    out, _ = rule(
        **given,
        initial_state=states,
        output_final_state=True,
        cu_seqlens=torch.tensor([0, *ends], dtype=torch.int32),
        head_first=head_first,
        use_qk_l2norm_in_kernel=True,
        initial_state_indices=torch.tensor(slots, dtype=torch.int32),
    )
    return out.float(), states


def token_by_token(
    given: dict[str, torch.Tensor], ends: list[int], slots: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """S <- e^g S; S <- S + beta k (v - S^T k); o = S^T q, in float64."""
    states = first_states()
    out = torch.empty(given["value"].shape)
    q, k = (
        (x / (x.square().sum(-1, keepdim=True) + 1e-5).sqrt()).repeat_interleave(HEADS // KEY_HEADS, 2)
        for x in (given["query"].double(), given["key"].double())
    )
    for begin, end, slot in zip([0, *ends[:-1]], ends, slots, strict=True):
        state = states[slot].double()
        for t in range(begin, end):
            state = given["g"][0, t].double().exp().view(-1, 1, 1) * state
            error = given["value"][0, t].double() - torch.einsum("hd,hdv->hv", k[0, t], state)
            state = state + torch.einsum("hd,hv->hdv", k[0, t], error * given["beta"][0, t].double().unsqueeze(-1))
            out[0, t] = torch.einsum("hd,hdv->hv", q[0, t], state) / DIM**0.5
        states[slot] = state
    return out, states


@pytest.mark.parametrize(("ends", "slots"), [([1], [2]), ([63, 64, 200], [3, 0, 1]), ([128], [0]), ([65], [3])])
def test_chunks_give_what_single_tokens_give(ends: list[int], slots: list[int]) -> None:
    given = inputs(ends[-1])
    out, states = asked(chunk_gated_delta_rule, given, ends, slots)
    wanted, last = token_by_token(given, ends, slots)
    assert (out - wanted).norm() / wanted.norm() < 0.003  # the output is rounded to bfloat16
    assert (states - last).norm() / last.norm() < 1e-5


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_prompt_in_two_parts_gives_the_same_bits(kind: torch.dtype) -> None:
    """As a prefix cache reads it, whose blocks end where chunks do."""
    given, cut = inputs(200), 128
    states = [torch.zeros(1, HEADS, DIM, DIM, dtype=kind) for _ in range(2)]
    whole, _ = asked(chunk_gated_delta_rule, given, [200], [0], states[0])
    parts = []
    for own in (slice(cut), slice(cut, None)):
        part = {name: x[:, own] for name, x in given.items()}
        parts.append(asked(chunk_gated_delta_rule, part, [part["g"].shape[1]], [0], states[1])[0])
    assert torch.equal(whole, torch.cat(parts, dim=1)) and torch.equal(*states)


def test_vllm_gives_the_same_and_less_exactly() -> None:
    given = inputs(150)
    wanted, last = token_by_token(given, [70, 150], [1, 2])
    theirs, ours = (asked(rule, given, [70, 150], [1, 2]) for rule in (THEIRS, chunk_gated_delta_rule))
    for (out, states), bound in ((theirs, 0.02), (ours, 0.003)):
        assert (out - wanted).norm() / wanted.norm() < bound
        assert (states - last).norm() / last.norm() < bound


def test_other_orders_are_refused() -> None:
    with pytest.raises(ValueError, match="head_first=True"):
        asked(chunk_gated_delta_rule, inputs(2), [2], [0], head_first=True)


@pytest.mark.parametrize("fast", [False, True])
def test_it_is_for_the_library_without_fast_products(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_rule, "has_int4_product", lambda: fast)
    sparkpin_vllm_cpu.register()
    assert ops.chunk_gated_delta_rule_cpu is (THEIRS if fast else chunk_gated_delta_rule)
