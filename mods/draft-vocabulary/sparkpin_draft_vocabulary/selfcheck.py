"""A step with drafts over states in float16, by vLLM's Triton kernel, against float64 (`sparkpin_modkit.selfcheck`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from sparkpin_modkit import check_vllm
from sparkpin_modkit.selfcheck import Compared

from sparkpin_draft_vocabulary.touches import ON_CUDA, STATES_IN

KEYS, VALUES, WIDTH, DRAFTED = 16, 64, 128, 3  # the 122B's heads; its GDN heads have 128 components
EPSILON = 1e-6
ROUNDED = 0.006
"""Of outputs, which are rounded to bfloat16 twice, 0.0017 each."""
ROUNDING = {torch.float16: 4e-4, torch.bfloat16: 3e-3, torch.float32: 2e-6}
"""Of states, rounded after each token."""


def case(kind: torch.dtype, tokens: Sequence[int], accepted: Sequence[int], packed: bool) -> dict[str, Any]:
    """Requests of so many tokens, each with its accepted count of the step before. Slot 0 is nobody's. packed: parts of
    wider rows, as a server's projections and its pages give them."""
    device = torch.device("cuda", torch.cuda.current_device())
    made, slots = torch.Generator(device).manual_seed(7), len(tokens) * DRAFTED

    def normal(*shape: int, of: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, generator=made, device=device).to(of)

    def rows(*widths: int) -> tuple[torch.Tensor, ...]:
        both = normal(count, sum(widths)).split(widths, dim=-1)
        return both if packed else tuple(part.contiguous() for part in both)

    count = sum(tokens)
    mixed, gate = rows((2 * KEYS + VALUES) * WIDTH, VALUES * WIDTH)
    a, b = rows(VALUES, VALUES)
    pages = (normal(1 + slots, VALUES * WIDTH * WIDTH + 512 * packed, of=torch.float32) / 8).to(torch.float16).to(kind)
    named = 1 + torch.randperm(slots, generator=made, device=device)
    ends = torch.tensor([0, *tokens], device=device).cumsum(0).to(torch.int32)
    return {
        "mixed_qkv": mixed,
        "a": a,
        "b": b,
        "A_log": normal(VALUES, of=torch.float32),
        "dt_bias": normal(VALUES, of=torch.float32),
        "state_indices": named.view(len(tokens), DRAFTED).to(torch.int32),
        "cu_seqlens": ends,
        "num_accepted_tokens": torch.tensor(accepted, dtype=torch.int32, device=device),
        "state": pages[:, : VALUES * WIDTH * WIDTH].unflatten(1, (VALUES, WIDTH, WIDTH)),
        "output_gate": gate.unflatten(1, (VALUES, WIDTH)),
        "norm_weight": normal(WIDTH, of=torch.float32),
        "out": torch.zeros(count, VALUES, WIDTH, dtype=torch.bfloat16, device=device),
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


@torch.inference_mode()
def check() -> Iterator[Compared]:
    """Five requests on the current GPU, if vLLM has the kernel: entry point of ``sparkpin.selfcheck``."""
    if check_vllm(ON_CUDA) not in STATES_IN:
        return
    from vllm.third_party.flash_linear_attention.ops.fused_gdn_decode_post_conv_mtp import (
        fused_gdn_decode_post_conv_mtp_triton,
    )

    given = case(torch.float16, (3, 1, 2, 3, 3), (3, 1, 2, 1, 3), packed=True)
    out, state = exact(given)
    fused_gdn_decode_post_conv_mtp_triton(**given)
    yield "GDN step", "float16 states, outputs", error(given["out"], out), ROUNDED
    yield "GDN step", "float16 states", error(given["state"], state), ROUNDING[torch.float16]
