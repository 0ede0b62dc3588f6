"""How the INT8 weights lie in a GPU's memory."""

from __future__ import annotations

import torch

ALIGNMENT = 16
"""Bytes: rows start where a thread's widest load may."""

READ_AHEAD = 512
"""Bytes after the last row that the kernel may read: no smaller than any tuned block_k."""


def lay_out(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Memory for ``[rows, columns]`` int8 codes with the padding that the kernel wants, which is zero.

    Returns:
        ``[rows, columns]`` int8, a view; its rows are a multiple of ALIGNMENT bytes apart.
    """
    stride = columns + -columns % ALIGNMENT
    memory = torch.zeros(rows * stride + READ_AHEAD, dtype=torch.int8, device=device)
    return memory.as_strided((rows, columns), (stride, 1))
