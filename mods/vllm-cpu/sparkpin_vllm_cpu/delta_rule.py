"""The gated delta rule of a prompt, in float32, on a CPU without AVX-512.

vLLM 0.32.0's kernel multiplies matrices of bfloat16, for which its library for AVX2 has no fast way: 512 tokens of a
layer took 182 ms, and take 12 ms here. The chunks and their triangular system are those of Yang, Kautz and Hatamizadeh,
*Gated Delta Networks* (arXiv 2412.06464, section 3.3). May go when that library has ``cpu_gemm_wna16``, or a kernel as
fast.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from sparkpin_modkit import check_signature

from sparkpin_vllm_cpu.linear import has_int4_product

CHUNK = 64  # tokens


def install() -> None:
    from vllm import _custom_ops

    check_signature(
        _custom_ops.chunk_gated_delta_rule_cpu,
        "query, key, value, g, beta, initial_state, output_final_state, cu_seqlens, head_first, "
        "use_qk_l2norm_in_kernel, initial_state_indices, eps",
    )
    if not has_int4_product():
        _custom_ops.chunk_gated_delta_rule_cpu = chunk_gated_delta_rule


def chunk_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    output_final_state: bool,
    cu_seqlens: torch.Tensor,
    head_first: bool,
    use_qk_l2norm_in_kernel: bool,
    initial_state_indices: torch.Tensor,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What vLLM's operator of that name does, for the two flags as vLLM sets them.

    Args:
        query, key: ``[1, T, Hk, D]``, of all sequences one after the other.
        value: ``[1, T, Hv, Dv]``; Hv is a multiple of Hk.
        g, beta: ``[1, T, Hv]``, logarithm of the decay, and the step.
        initial_state: ``[slots, Hv, D, Dv]``; those of these sequences are replaced by their last.
        cu_seqlens: ``[N + 1]``, where each sequence begins.
        initial_state_indices: ``[N]``, the slot of each.

    Returns:
        ``[1, T, Hv, Dv]`` of value's type, and `initial_state`.
    """
    if head_first or not use_qk_l2norm_in_kernel:
        raise ValueError(
            f"head_first={head_first}, use_qk_l2norm_in_kernel={use_qk_l2norm_in_kernel}; expected no and yes"
        )
    out, repeats = torch.empty_like(value), value.shape[2] // query.shape[2]
    for (begin, end), slot in zip(pairwise(cu_seqlens.tolist()), initial_state_indices.tolist(), strict=True):
        state = initial_state[slot].float()
        for start in range(begin, end, CHUNK):
            own = slice(start, min(start + CHUNK, end))
            q, k = (normed(x[0, own], eps).repeat_interleave(repeats, 0) for x in (query, key))
            v, steps = (x[0, own].float().transpose(0, 1) for x in (value, beta.unsqueeze(-1)))
            decays = g[0, own].float().t().cumsum(-1).unsqueeze(-1)  # [Hv, t, 1], since the chunk began
            between = (decays - decays.mT).tril().exp().tril()
            mixing = (steps * (k @ k.mT) * between).tril(-1)
            wanted = steps * (v - decays.exp() * (k @ state))
            written = torch.linalg.solve_triangular(mixing, wanted, upper=False, unitriangular=True)
            read = decays.exp() * (q @ state) + (q @ k.mT * between) @ written
            out[0, own] = (read * q.shape[-1] ** -0.5).transpose(0, 1)
            last = decays[:, -1:]
            state = last.exp() * state + (k * (last - decays).exp()).mT @ written
            # As vLLM's operator does: a prompt that goes on from a cached state gives the bits of a whole one then.
            state = state.to(initial_state.dtype).float()
        initial_state[slot] = state
    return out, initial_state


def normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    """``[t, H, D]`` as ``[H, t, D]`` float32, each of length 1."""
    x = x.float().transpose(0, 1)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
