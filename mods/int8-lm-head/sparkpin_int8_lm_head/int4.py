"""A head's rows in 4 bits, for a drafter: made from its INT8 rows, and read by the same product of whole numbers.

A code c in -8..7 stands for the INT8 number 16 c + 8, so a row has sixteen, evenly spaced and none of them zero::

    W[v, k]  ~  row_scale[v] * (16 * c[v, k] + 8) * column_scale[k]

The relative error of normally distributed weights is 0.11, thirteen times that of INT8. The model checks what is
drafted, so that it costs acceptance alone.
"""

from __future__ import annotations

import torch

from sparkpin_int8_lm_head.layout import ALIGNMENT, lay_out

SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
"""Of a row's largest magnitude, how far the sixteen numbers reach: what lies beyond is clipped. The best is taken."""


def quantise(q: torch.Tensor, row_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """INT8 rows -> those of the sixteen numbers with the least square error that SHARES offer.

    Args:
        q: ``[R, K]`` int8, row_scale: ``[R]`` of any floating type, as `naive.quantise` makes them.

    Returns:
        ``[R, K]`` int8, each 16 c + 8, and ``[R]`` float32. A row of zeros has scale 0.
    """
    exact = q.float()
    largest = exact.abs().amax(dim=1, keepdim=True)
    best, codes, chosen = torch.full_like(largest, torch.inf), torch.zeros_like(exact), torch.zeros_like(largest)
    for share in SHARES:
        step = torch.where(largest > 0, largest * (share / 8), torch.ones_like(largest))
        tried = torch.floor(exact / step).clamp(-8, 7)
        error = ((tried + 0.5) * step - exact).square().sum(dim=1, keepdim=True)
        codes = torch.where(error < best, tried, codes)
        chosen = torch.where(error < best, step, chosen)
        best = torch.minimum(best, error)
    scale = torch.where(largest > 0, row_scale.float()[:, None] * chosen / 16, torch.zeros_like(largest))
    return (codes * 16 + 8).to(torch.int8), scale[:, 0]


def half_of(columns: int) -> int:
    """Bytes of a row: byte k has the code of column k in its lower half, of column ``half_of + k`` in its upper."""
    half = -(-columns // 2)
    return half + -half % ALIGNMENT


def memory(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """``[rows, half_of(columns)]`` int8 zeros, as the kernel wants packed rows to lie."""
    return lay_out(rows, half_of(columns), device)


def pack(numbers: torch.Tensor) -> torch.Tensor:
    """``[R, K]`` int8 of `quantise` -> ``[R, half_of(K)]`` int8; columns beyond K have code 0."""
    codes = torch.nn.functional.pad(numbers >> 4, (0, 2 * half_of(numbers.shape[1]) - numbers.shape[1]))
    low, high = codes.chunk(2, dim=1)
    return (low & 15) | (high << 4)


def unpack(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """``[R, half_of(K)]`` int8 -> ``[R, K]`` int8, each 16 c + 8."""
    return torch.cat([(packed << 4) | 8, (packed & -16) | 8], dim=1)[:, :columns]
