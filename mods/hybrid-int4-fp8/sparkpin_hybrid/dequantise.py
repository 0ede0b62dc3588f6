"""Block-FP8 weights in plain torch."""

from __future__ import annotations

import torch


def dequantise_blocks(
    weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """Expand block-scaled FP8 weights.

    Args:
        weight: ``[N, K]`` float8_e4m3fn.
        scale: ``[ceil(N / block[0]), ceil(K / block[1])]`` float32 (the checkpoint's ``weight_scale_inv``).
        block: rows and columns that share a scale.
        dtype: type of the result.

    Returns:
        ``[N, K]``: ``weight * scale`` in float32, rounded once to `dtype`.
    """
    rows, columns = weight.shape
    wanted = (-(-rows // block[0]), -(-columns // block[1]))
    if tuple(scale.shape) != wanted:
        raise ValueError(f"scales {tuple(scale.shape)} for FP8 weights {tuple(weight.shape)}, expected {wanted}")
    out = torch.empty(rows, columns, dtype=dtype, device=weight.device)
    for i in range(wanted[0]):
        band = slice(i * block[0], min((i + 1) * block[0], rows))
        out[band] = (weight[band].float() * scale[i].float().repeat_interleave(block[1])[:columns]).to(dtype)
    return out
