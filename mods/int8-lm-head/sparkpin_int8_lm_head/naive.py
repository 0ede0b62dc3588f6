"""The executable specification, in plain float32 torch. Everything else in this package must agree with it.

A weight ``W[v, k]`` is stored as ``q[v, k]``, INT8 in -127..127, with a scale per row and one per column::

    W[v, k]  ~  row_scale[v] * q[v, k] * column_scale[k]
    logits[v] =  row_scale[v] * sum_k q[v, k] * (column_scale[k] * x[k])

Column scales are powers of two, so that multiplying them into a bfloat16 or float16 `x` is exact (short of overflow).
"""

from __future__ import annotations

import torch

QMAX = 127


def round_up_to(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The smallest numbers of `dtype` that are not below `value` (float32, positive), as float32."""
    rounded = value.to(dtype)
    below = rounded.float() < value
    return torch.where(below, torch.nextafter(rounded, torch.full_like(rounded, torch.inf)), rounded).float()


def quantise(
    weight: torch.Tensor, column_scale: torch.Tensor, scale_dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise symmetrically by row, after dividing out the column scales.

    Args:
        weight: ``[V, K]``, any floating type.
        column_scale: ``[K]`` float32.
        scale_dtype: type in which row scales will be kept. They are rounded up to it *before* the weights are divided
            by them, so that keeping them in bfloat16 costs no accuracy of its own and nothing is clipped.

    Returns:
        ``q`` ``[V, K]`` int8 and ``row_scale`` ``[V]`` float32, exactly representable in `scale_dtype`. A row of zeros
        has scale 1.
    """
    scaled = weight.float() / column_scale
    row_scale = scaled.abs().amax(dim=1) / QMAX
    row_scale = round_up_to(torch.where(row_scale == 0, torch.ones_like(row_scale), row_scale), scale_dtype)
    q = torch.round(scaled / row_scale[:, None]).clamp(-QMAX, QMAX)
    return q.to(torch.int8), row_scale


def dequantise(q: torch.Tensor, row_scale: torch.Tensor, column_scale: torch.Tensor) -> torch.Tensor:
    """``[V, K]`` float32 weights that `q` stands for."""
    return q.float() * row_scale[:, None] * column_scale


def logits(x: torch.Tensor, q: torch.Tensor, row_scale: torch.Tensor, column_scale: torch.Tensor) -> torch.Tensor:
    """``x`` ``[M, K]`` -> ``[M, V]`` float32."""
    return ((x.float() * column_scale) @ q.float().T) * row_scale
