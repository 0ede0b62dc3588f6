"""The GPU's INT8 matrix product: the kernel behind checked shapes, and its rehearsal while the model loads."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from sparkpin_int8_lm_head.kernel import launch
from sparkpin_int8_lm_head.tuned import Tuned, tile_for

DTYPES = (torch.bfloat16, torch.float16)


def int8_linear(
    x: torch.Tensor,
    q: torch.Tensor,
    row_scale: torch.Tensor,
    bias: torch.Tensor | None,
    tuned: Mapping[int, Tuned],
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``(x @ q.T) * row_scale + bias``, accumulated in float32. May be captured in a CUDA graph.

    Args:
        x: ``[B, K]`` bfloat16 or float16.
        q: ``[V, K]`` int8 from `layout.lay_out`.
        row_scale, bias: ``[V]``, any floating type.
        tuned: from `tuned.tuned_for`.
        out: ``[B, V]`` contiguous, to be written; a new tensor of x's type where it is None.

    Returns:
        ``out``.
    """
    tokens, rows = x.shape[0], q.shape[0]
    if x.dtype not in DTYPES or x.dim() != 2 or x.shape[1] != q.shape[1]:
        raise ValueError(f"int8_linear: x {tuple(x.shape)} {x.dtype}, q {tuple(q.shape)}; wanted [B, K] in 16 bits")
    if out is None:
        out = torch.empty(tokens, rows, dtype=x.dtype, device=x.device)
    if tokens:
        x = x.contiguous()
        if x.data_ptr() % 16:  # the kernel is compiled for 16-byte loads
            x = x.clone()
        launch(out, x, q, row_scale, bias, tile_for(tokens, tuned))
    return out


def prepare(
    q: torch.Tensor, row_scale: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, tuned: Mapping[int, Tuned]
) -> None:
    """Run every tile size on this head once, so that no request compiles or loads a kernel."""
    for size in tuned:
        x = torch.zeros(size, q.shape[1], dtype=dtype, device=q.device)
        int8_linear(x, q, row_scale, bias, tuned)
