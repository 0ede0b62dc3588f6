"""Quantise an LM head in slices, with column scales that take outlier columns out of the rows' range.

A CPU and a GPU come to the same bytes: each operation on a float32 number is one that IEEE 754 rounds correctly, and no
sum decides by its last digits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sparkpin_int8_lm_head import naive

ALPHAS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""A column is an outlier when its largest weight exceeds alpha times the median column's; each is tried."""

SAMPLE_ROWS = 4096
GAIN = 1e-6
"""The least share of the error that other column scales must save: more than comes of another order of additions."""

ROOT_OF_2 = 0x3504F3
"""The bits behind the binary point of the root of 2, in float32."""

SLICES = 512
LEAST_SLICE = 64


@dataclass(frozen=True)
class Int8Head:
    """``q`` ``[V, K]`` int8 (or wider), ``row_scale`` ``[V]`` and ``column_scale`` ``[K]`` in the head's own type.

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


def slices(rows: int) -> Iterator[slice]:
    """Parts of a head, at most 1/SLICES of it (or LEAST_SLICE rows): what is copied to float32 at a time.

    Some six such copies live at once, each of twice the bytes of 16 bits: 2.5 % of a large head.
    """
    size = max(LEAST_SLICE, rows // SLICES)
    return (slice(start, min(rows, start + size)) for start in range(0, rows, size))


def column_amax(weight: torch.Tensor) -> torch.Tensor:
    """``[K]`` float32: the largest magnitude in each column of ``weight`` ``[V, K]``."""
    amax = torch.zeros(weight.shape[1], dtype=torch.float32, device=weight.device)
    for part in slices(weight.shape[0]):
        amax = torch.maximum(amax, weight[part].abs().amax(dim=0).float())
    return amax


def outlier_scales(amax: torch.Tensor, alpha: float) -> torch.Tensor:
    """``[K]`` float32: ``max(1, amax / (alpha * median(amax)))``, rounded to a power of two."""
    bound = alpha * amax.median()
    ratio = torch.where(bound > 0, amax / bound, torch.ones_like(amax)).clamp(min=1.0)
    # By its bits: a mantissa from the root of 2 on carries into the exponent, and then it goes. Logarithms differ in
    # their last digit from machine to machine.
    return ((ratio.view(torch.int32) + (0x800000 - ROOT_OF_2)) & -0x800000).view(torch.float32)


def relative_error(weight: torch.Tensor, column_scale: torch.Tensor) -> float:
    """Relative root mean square error of ``weight`` ``[R, K]`` once quantised.

    For inputs of independent components of equal variance this is the relative error of the logits.
    """
    lost = torch.zeros((), dtype=torch.float64, device=weight.device)
    whole = torch.zeros_like(lost)
    for start in range(0, weight.shape[0], LEAST_SLICE):
        part = weight[start : start + LEAST_SLICE]
        q, row_scale = naive.quantise(part, column_scale, weight.dtype)
        lost += (naive.dequantise(q, row_scale, column_scale) - part.float()).double().square().sum()
        whole += part.double().square().sum()
    return float((lost / whole).sqrt()) if whole > 0 else 0.0


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
        if candidate_error < error * (1 - GAIN):
            best, chosen, error = candidate, alpha, candidate_error
    return best, chosen, error


def quantise_head(weight: torch.Tensor, q: torch.Tensor | None = None) -> Int8Head:
    """Quantise ``weight`` ``[V, K]`` (bfloat16, float16 or float32).

    Args:
        q: where the codes go, ``[V, >= K]`` int8; columns beyond K stay as they are. Memory of its own if None.

    Raises:
        ValueError: the weight is not two-dimensional floating point, or holds NaN or infinity.
    """
    if weight.dim() != 2 or weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(
            f"LM head weight {tuple(weight.shape)} {weight.dtype}: expected [V, K] in bfloat16, float16 or float32"
        )
    column_scale, alpha, error = choose_column_scale(weight)
    rows, columns = weight.shape
    if q is None:
        q = torch.empty(rows, columns, dtype=torch.int8, device=weight.device)
    row_scale = torch.empty(rows, dtype=weight.dtype, device=weight.device)
    for part in slices(rows):
        q[part, :columns], scale = naive.quantise(weight[part], column_scale, weight.dtype)
        row_scale[part] = scale.to(weight.dtype)
    bad = (~torch.isfinite(row_scale)).nonzero()
    if bad.numel():
        raise ValueError(f"LM head weight has NaN or infinity in row {int(bad[0])}")
    return Int8Head(q, row_scale, column_scale.to(weight.dtype), alpha, error)


def same_head(one: Int8Head, other: Int8Head) -> bool:
    """Whether both hold the same numbers in memory of the same kind."""
    if one.q.shape != other.q.shape or one.q.device != other.q.device or one.row_scale.dtype != other.row_scale.dtype:
        return False
    if not (torch.equal(one.row_scale, other.row_scale) and torch.equal(one.column_scale, other.column_scale)):
        return False
    return all(torch.equal(one.q[part], other.q[part]) for part in slices(one.q.shape[0]))
