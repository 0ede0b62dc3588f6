"""vLLM's Triton step over float16 states, as CUDA gets it: against float64, beside its CUDA kernel with the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sparkpin_draft_vocabulary import hook

GPU = torch.device("cuda", 0)
KEYS, VALUES, WIDTH, SLOTS, DRAFTED = 16, 64, 128, 64, 3  # the 122B's heads; its GDN heads have 128 components
EPSILON = 1e-6
ROUNDING = {torch.float16: 4e-4, torch.bfloat16: 3e-3, torch.float32: 2e-6}  # of states, rounded after each token
USERS = ((3, 1, 2, 3) * 4, (3, 1, 2, 1) * 4)


@pytest.fixture(scope="module")
def layer() -> Any:
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn

    hook.install()
    return qwen_gdn_linear_attn


def case(kind: torch.dtype, tokens: tuple[int, ...], accepted: tuple[int, ...], packed: bool) -> dict[str, Any]:
    """Requests of so many tokens, each with its accepted count of the step before. Slot 0 is nobody's. packed: parts of
    wider rows, as a server's projections and its pages give them."""
    made = torch.Generator(GPU).manual_seed(7)

    def normal(*shape: int, of: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, generator=made, device=GPU).to(of)

    def rows(*widths: int) -> tuple[torch.Tensor, ...]:
        both = normal(count, sum(widths)).split(widths, dim=-1)
        return both if packed else tuple(part.contiguous() for part in both)

    count, requests = sum(tokens), len(tokens)
    mixed, gate = rows((2 * KEYS + VALUES) * WIDTH, VALUES * WIDTH)
    a, b = rows(VALUES, VALUES)
    pages = (normal(SLOTS, VALUES * WIDTH * WIDTH + 512 * packed, of=torch.float32) / 8).to(torch.float16).to(kind)
    slots = 1 + torch.randperm(SLOTS - 1, generator=made, device=GPU)[: requests * DRAFTED]
    ends = torch.tensor([0, *tokens], device=GPU).cumsum(0).to(torch.int32)
    return {
        "mixed_qkv": mixed,
        "a": a,
        "b": b,
        "A_log": normal(VALUES, of=torch.float32),
        "dt_bias": normal(VALUES, of=torch.float32),
        "state_indices": slots.view(requests, DRAFTED).to(torch.int32),
        "cu_seqlens": ends,
        "num_accepted_tokens": torch.tensor(accepted, dtype=torch.int32, device=GPU),
        "state": pages[:, : VALUES * WIDTH * WIDTH].unflatten(1, (VALUES, WIDTH, WIDTH)),
        "output_gate": gate.unflatten(1, (VALUES, WIDTH)),
        "norm_weight": normal(WIDTH, of=torch.float32),
        "out": torch.zeros(count, VALUES, WIDTH, dtype=torch.bfloat16, device=GPU),
        "scale": WIDTH**-0.5,
        "norm_eps": EPSILON,
        "output_gate_activation": "silu",
    }


def exact(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and states in float64: the gated delta rule (Yang et al. 2024), then the gated RMS norm."""
    state, out = given["state"].double().clone(), given["out"].double().clone()
    rows = given["mixed_qkv"].double()
    q, k, v = rows.split([KEYS * WIDTH, KEYS * WIDTH, VALUES * WIDTH], dim=-1)
    q, k = (
        torch.nn.functional.normalize(x.view(-1, KEYS, WIDTH), dim=-1, eps=1e-3).repeat_interleave(VALUES // KEYS, 1)
        for x in (q, k)
    )
    decay = torch.exp(
        -given["A_log"].double().exp() * torch.nn.functional.softplus(given["a"].double() + given["dt_bias"].double())
    )
    beta, ends = given["b"].double().sigmoid(), given["cu_seqlens"].tolist()
    for request, slots in enumerate(given["state_indices"].tolist()):
        h = state[slots[int(given["num_accepted_tokens"][request]) - 1]].clone()
        for place, row in enumerate(range(ends[request], ends[request + 1])):
            h = h * decay[row, :, None, None]
            delta = (v.view(-1, VALUES, WIDTH)[row] - (h * k[row, :, None, :]).sum(-1)) * beta[row, :, None]
            h = h + delta[..., None] * k[row, :, None, :]
            out[row] = (h * q[row, :, None, :]).sum(-1) * given["scale"]
            state[slots[place]] = h
    out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + EPSILON) * given["norm_weight"].double()
    return out * torch.nn.functional.silu(given["output_gate"].double()), state


def error(seen: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((seen.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("packed", [False, True], ids=["alone", "packed"])
@pytest.mark.parametrize("kind", ROUNDING, ids=str)
@pytest.mark.parametrize(
    ("tokens", "accepted"), [((3,), (1,)), ((3, 3, 3), (1, 2, 3)), ((3, 1, 2, 3, 3), (3, 1, 2, 1, 3)), USERS]
)
def test_a_step_with_drafts(
    layer: Any, kind: torch.dtype, tokens: tuple[int, ...], accepted: tuple[int, ...], packed: bool
) -> None:
    assert kind in layer.FUSED_GDN_STATE_DTYPES
    given = case(kind, tokens, accepted, packed)
    out, state = exact(given)
    layer.fused_mtp_decode_impl()(**given)
    torch.cuda.synchronize()
    assert error(given["out"], out) < 0.006  # the output is rounded to bfloat16 twice, 0.0017 each
    assert error(given["state"], state) < ROUNDING[kind]
