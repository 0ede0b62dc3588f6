"""A head's rows in 4 bits: the sixteen numbers, how they are chosen, and how they lie."""

from __future__ import annotations

import pytest
import torch
from sparkpin_int8_lm_head import int4, naive
from sparkpin_int8_lm_head.layout import ALIGNMENT, READ_AHEAD


def rows(count: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.randn(count, columns, generator=torch.Generator().manual_seed(columns)) * 0.02
    return naive.quantise(weight, torch.ones(columns), torch.bfloat16)


@pytest.mark.parametrize("columns", [1, 16, 31, 33, 100, 3072])
def test_packed_rows_come_back(columns: int) -> None:
    numbers, _ = int4.quantise(*rows(7, columns))
    packed = int4.pack(numbers)
    assert packed.shape == (7, int4.half_of(columns)) and packed.shape[1] % ALIGNMENT == 0
    assert torch.equal(int4.unpack(packed, columns), numbers)
    laid = int4.memory(7, columns, torch.device("cpu"))
    laid.copy_(packed)
    assert torch.equal(int4.unpack(laid, columns), numbers)
    assert laid.untyped_storage().nbytes() >= packed.numel() + READ_AHEAD


def test_sixteen_numbers_symmetric_and_without_zero() -> None:
    numbers, _ = int4.quantise(*rows(64, 3072))
    assert numbers.unique().tolist() == [16 * code + 8 for code in range(-8, 8)]


def test_the_error_is_that_of_sixteen_even_steps() -> None:
    """Lloyd's best for normal numbers is 0.0115 of their square: the root is 0.107. Without clipping it is 0.14."""
    q, row_scale = rows(256, 3072)
    exact = q.float() * row_scale[:, None]
    numbers, scale = int4.quantise(q, row_scale)
    error = (numbers.float() * scale[:, None] - exact).norm() / exact.norm()
    assert 0.105 < float(error) < 0.111
    each = (numbers.float() * scale[:, None] - exact).norm(dim=1) / exact.norm(dim=1)
    assert float(each.max()) < 0.13


def test_rows_that_the_numbers_hold_exactly() -> None:
    q = torch.tensor([[-120, -8, 8, 120], [0, 0, 0, 0], [127, 127, -127, 127]], dtype=torch.int8)
    numbers, scale = int4.quantise(q, torch.tensor([0.5, 1.0, 2.0]))
    found = numbers.float() * scale[:, None]
    assert torch.equal(found[1], torch.zeros(4))
    assert float((found[2] - 2 * q[2].float()).abs().max()) <= 2 * 127 / 16
    assert bool((found[0].sign() == q[0].sign()).all())
