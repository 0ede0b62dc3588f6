"""The executable specification, in plain float32 torch. Everything else in this package must agree with it.

A weight ``W[v, k]`` is stored as ``q[v, k]``, INT8 in -127..127, with a scale per row and one per column::

    W[v, k]  ~  row_scale[v] * q[v, k] * column_scale[k]
    logits[v] =  row_scale[v] * sum_k q[v, k] * (column_scale[k] * x[k])

Column scales are powers of two, so that multiplying them into a bfloat16 or float16 `x` is exact (short of overflow).
"""

from __future__ import annotations

import torch

QMAX = 127
INPUT_MAX = 127 * 256


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
    row_scale = scaled.abs().amax(dim=1)
    row_scale = row_scale / row_scale.new_tensor(QMAX)  # by a number, torch multiplies by its reciprocal on a GPU
    row_scale = round_up_to(torch.where(row_scale == 0, torch.ones_like(row_scale), row_scale), scale_dtype)
    q = torch.round(scaled / row_scale[:, None]).clamp(-QMAX, QMAX)
    return q.to(torch.int8), row_scale


def dequantise(q: torch.Tensor, row_scale: torch.Tensor, column_scale: torch.Tensor) -> torch.Tensor:
    """``[V, K]`` float32 weights that `q` stands for."""
    return q.float() * row_scale[:, None] * column_scale


def logits(x: torch.Tensor, q: torch.Tensor, row_scale: torch.Tensor, column_scale: torch.Tensor) -> torch.Tensor:
    """``x`` ``[M, K]`` -> ``[M, V]`` float32."""
    return ((x.float() * column_scale) @ q.float().T) * row_scale


def digits(x: torch.Tensor, column_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Activations as the GPU multiplies them: 16-bit fixed point with a scale per token, in two INT8 digits::

        column_scale[k] * x[m, k]  ~  scale[m] * (256 * digits[m, 0, k] + digits[m, 1, k])

    A step is 1/32512 of the token's largest component. The root mean square error, relative to the norm of the scaled
    token, is 0.00004 for normally distributed components and K = 3072, and 0.0005 at worst, when one component has all
    of the norm. The rounding of `x` to bfloat16, which came before, is 0.0017.

    Returns:
        ``[M, 2, K]`` int8 and ``[M]`` float32.
    """
    scaled = x.float() * column_scale
    largest = scaled.abs().amax(dim=1)
    scale = torch.where(largest > 1e-30, largest / INPUT_MAX, torch.ones_like(largest))
    number = torch.floor(scaled / scale[:, None] + 0.5).to(torch.int32)
    high = (number + 128) >> 8
    scale = torch.where(scaled.isfinite().all(dim=1), scale, torch.nan)
    return torch.stack([high, number - high * 256], dim=1).to(torch.int8), scale
