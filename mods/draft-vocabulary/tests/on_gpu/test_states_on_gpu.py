"""vLLM's Triton step over float16 states, as CUDA gets it: against float64, and beside the CUDA kernel with float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sparkpin_draft_vocabulary import states

GPU = torch.device("cuda", 0)
KEYS, VALUES, WIDTH, SLOTS, DRAFTED = 16, 64, 128, 16, 3  # the 122B's heads; its GDN heads have 128 components
EPSILON = 1e-6


@pytest.fixture(scope="module")
def layer() -> Any:
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn

    states.install()
    return qwen_gdn_linear_attn


def case(kind: torch.dtype, tokens: tuple[int, ...], accepted: tuple[int, ...]) -> dict[str, Any]:
    """Requests of so many tokens, each with its accepted count of the step before. Slot 0 is nobody's."""
    made = torch.Generator(GPU).manual_seed(7)

    def normal(*shape: int, of: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, generator=made, device=GPU).to(of)

    count, requests = sum(tokens), len(tokens)
    slots = 1 + torch.randperm(SLOTS - 1, generator=made, device=GPU)[: requests * DRAFTED]
    ends = torch.tensor([0, *tokens], device=GPU).cumsum(0).to(torch.int32)
    return {
        "mixed_qkv": normal(count, (2 * KEYS + VALUES) * WIDTH),
        "a": normal(count, VALUES),
        "b": normal(count, VALUES),
        "A_log": normal(VALUES, of=torch.float32),
        "dt_bias": normal(VALUES, of=torch.float32),
        "state_indices": slots.view(requests, DRAFTED).to(torch.int32),
        "cu_seqlens": ends,
        "num_accepted_tokens": torch.tensor(accepted, dtype=torch.int32, device=GPU),
        "state": (normal(SLOTS, VALUES, WIDTH, WIDTH, of=torch.float32) / 8).to(torch.float16).to(kind),
        "output_gate": normal(count, VALUES, WIDTH),
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


@pytest.mark.parametrize("kind", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("tokens", "accepted"), [((3,), (1,)), ((3, 3, 3), (1, 2, 3)), ((3, 1, 2, 3, 3), (3, 1, 2, 1, 3))]
)
def test_a_step_with_drafts(layer: Any, kind: torch.dtype, tokens: tuple[int, ...], accepted: tuple[int, ...]) -> None:
    assert kind in layer.FUSED_GDN_STATE_DTYPES
    given = case(kind, tokens, accepted)
    out, state = exact(given)
    layer.fused_mtp_decode_impl()(**given)
    torch.cuda.synchronize()
    assert error(given["out"], out) < 0.006  # the output is rounded to bfloat16 twice, 0.0017 each
    assert error(given["state"], state) < (4e-4 if kind == torch.float16 else 2e-6)
