"""The CPU's INT8 matrix product, behind the shapes that it computes correctly."""

from __future__ import annotations

import torch

K_MULTIPLE = 64
"""``aten::_weight_int8pack_mm`` of torch 2.13 does not check K: where K is not a multiple of its vector width (16 with
AVX-512) it reads past the end of each row and answers garbage. 64 covers any width up to 512 bits of int8."""


def padded(columns: int) -> int:
    """The next multiple of K_MULTIPLE."""
    return columns + -columns % K_MULTIPLE


def pad_columns(tensor: torch.Tensor) -> torch.Tensor:
    """Append zeros to the last dimension up to a multiple of K_MULTIPLE; contiguous, and a copy only where needed."""
    missing = padded(tensor.shape[-1]) - tensor.shape[-1]
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor.contiguous()


def int8_linear(x: torch.Tensor, q: torch.Tensor, row_scale: torch.Tensor) -> torch.Tensor:
    """``(x @ q.T) * row_scale``, accumulated in float32.

    Args:
        x: ``[M, K]`` bfloat16, float16 or float32.
        q: ``[V, Kp]`` int8 from `pad_columns`, Kp >= K.
        row_scale: ``[V]``, type of `x`.

    Returns:
        ``[M, V]``, type of `x`.
    """
    if q.shape[1] % K_MULTIPLE or not 0 <= q.shape[1] - x.shape[1] < K_MULTIPLE:
        raise ValueError(f"int8_linear: x {tuple(x.shape)}, q {tuple(q.shape)}; expected q from pad_columns")
    return torch.ops.aten._weight_int8pack_mm(pad_columns(x), q, row_scale)
