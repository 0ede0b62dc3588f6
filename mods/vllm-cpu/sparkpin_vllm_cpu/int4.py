"""The INT4 code of vLLM's MoeWNA16 layout, which is GPTQ's with rows of outputs, in plain torch."""

from __future__ import annotations

import torch

ZERO_POINT = 8


def dequantise_int4(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Expand symmetric group-wise INT4 weights.

    Args:
        packed: ``[E, N, K / 2]`` uint8, the even input channel in the low four bits; code = value + 8.
        scales: ``[E, N, G]``, one scale for each ``K / G`` consecutive input channels.
        dtype: type of the result.

    Returns:
        ``[E, N, K]``: ``(code - 8) * scale``, computed in float32 and rounded once to `dtype`.
    """
    experts, rows, half = packed.shape
    columns = 2 * half
    groups = scales.shape[2]
    if packed.dtype != torch.uint8 or scales.shape[:2] != packed.shape[:2] or columns % groups:
        raise ValueError(
            f"INT4: packed {tuple(packed.shape)} {packed.dtype}, scales {tuple(scales.shape)}; "
            "expected uint8 [E, N, K/2] and [E, N, G] with K divisible by G"
        )
    out = torch.empty(experts, rows, columns, dtype=dtype, device=packed.device)
    # One expert at a time bounds the float32 copy.
    for e in range(experts):
        codes = torch.stack((packed[e] & 0xF, packed[e] >> 4), dim=-1).view(rows, groups, columns // groups)
        out[e] = ((codes.float() - ZERO_POINT) * scales[e].float().unsqueeze(-1)).view(rows, columns).to(dtype)
    return out
