"""Quantise an LM head in slices, with column scales that take outlier columns out of the rows' range."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparkpin_int8_lm_head import naive

ALPHAS = (2.0, 3.0, 4.0, 6.0)
"""A column is an outlier when its largest weight exceeds alpha times the median column's; each is tried."""

SLICE_ROWS = 8192
SAMPLE_ROWS = 4096


@dataclass(frozen=True)
class Int8Head:
    """``q`` ``[V, K]`` int8, ``row_scale`` ``[V]`` and ``column_scale`` ``[K]`` in the head's own type.

    ``alpha`` is None when no column is scaled; ``error`` is the relative root mean square error of the sampled weights.
    """

    q: torch.Tensor
    row_scale: torch.Tensor
    column_scale: torch.Tensor
    alpha: float | None
    error: float

    @property
    def outlier_columns(self) -> int:
        return int((self.column_scale.float() != 1).sum())

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.q, self.row_scale, self.column_scale))


def column_amax(weight: torch.Tensor) -> torch.Tensor:
    """``[K]`` float32: the largest magnitude in each column of ``weight`` ``[V, K]``."""
    amax = torch.zeros(weight.shape[1], dtype=torch.float32, device=weight.device)
    for start in range(0, weight.shape[0], SLICE_ROWS):
        amax = torch.maximum(amax, weight[start : start + SLICE_ROWS].abs().amax(dim=0).float())
    return amax


def outlier_scales(amax: torch.Tensor, alpha: float) -> torch.Tensor:
    """``[K]`` float32: ``max(1, amax / (alpha * median(amax)))``, rounded to a power of two."""
    bound = alpha * amax.median()
    ratio = torch.where(bound > 0, amax / bound, torch.ones_like(amax))
    return torch.exp2(torch.round(torch.log2(ratio.clamp(min=1.0))))


def relative_error(weight: torch.Tensor, column_scale: torch.Tensor) -> float:
    """Relative root mean square error of ``weight`` ``[R, K]`` once quantised.

    For inputs of independent components of equal variance this is the relative error of the logits.
    """
    scale_dtype = weight.dtype
    q, row_scale = naive.quantise(weight, column_scale, scale_dtype)
    difference = naive.dequantise(q, row_scale, column_scale) - weight.float()
    norm = weight.float().norm()
    return float(difference.norm() / norm) if norm > 0 else 0.0


def choose_column_scale(weight: torch.Tensor) -> tuple[torch.Tensor, float | None, float]:
    """Column scales with the least error on evenly spaced rows of ``weight`` ``[V, K]``.

    Returns:
        ``column_scale`` ``[K]`` float32, the alpha that it came from (None: no column scaled), the error.
    """
    step = max(1, weight.shape[0] // SAMPLE_ROWS)
    sample = weight[::step][:SAMPLE_ROWS]
    best = torch.ones(weight.shape[1], dtype=torch.float32, device=weight.device)
    chosen: float | None = None
    error = relative_error(sample, best)
    amax = column_amax(weight)
    for alpha in ALPHAS:
        candidate = outlier_scales(amax, alpha)
        if not bool((candidate != 1).any()):
            continue
        candidate_error = relative_error(sample, candidate)
        if candidate_error < error:
            best, chosen, error = candidate, alpha, candidate_error
    return best, chosen, error


def quantise_head(weight: torch.Tensor) -> Int8Head:
    """Quantise ``weight`` ``[V, K]`` (bfloat16, float16 or float32).

    Needs, beside the result, float32 copies of SLICE_ROWS rows only.

    Raises:
        ValueError: the weight is not two-dimensional floating point, or holds NaN or infinity.
    """
    if weight.dim() != 2 or weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(
            f"LM head weight {tuple(weight.shape)} {weight.dtype}: wanted [V, K] in bfloat16, float16 or float32"
        )
    column_scale, alpha, error = choose_column_scale(weight)
    rows, columns = weight.shape
    q = torch.empty(rows, columns, dtype=torch.int8, device=weight.device)
    row_scale = torch.empty(rows, dtype=weight.dtype, device=weight.device)
    for start in range(0, rows, SLICE_ROWS):
        part = slice(start, start + SLICE_ROWS)
        slice_q, slice_scale = naive.quantise(weight[part], column_scale, weight.dtype)
        if not bool(torch.isfinite(slice_scale).all()):
            raise ValueError(f"LM head weight has NaN or infinity in rows {start} to {start + slice_scale.numel() - 1}")
        q[part] = slice_q
        row_scale[part] = slice_scale.to(weight.dtype)
    return Int8Head(q, row_scale, column_scale.to(weight.dtype), alpha, error)
