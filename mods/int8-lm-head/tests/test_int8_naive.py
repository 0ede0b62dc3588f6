from __future__ import annotations

import pytest
import torch
from sparkpin_int8_lm_head import naive
from sparkpin_int8_lm_head.cpu import K_MULTIPLE, int8_linear, pad_columns
from sparkpin_int8_lm_head.quantise import (
    LEAST_SLICE,
    SLICES,
    choose_column_scale,
    column_amax,
    outlier_scales,
    quantise_head,
    relative_error,
    same_head,
    slices,
)

SHAPES = [(1, 1), (7, 33), (77, 100), (130, 384), (1001, 130), (64, 64)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def head(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16, outliers: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows + columns)
    weight = torch.randn(rows, columns, generator=generator) * 0.02
    if outliers:
        weight[:, torch.randperm(columns, generator=generator)[:outliers]] *= 8
    return weight.to(dtype)


def hidden(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(7)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), SHAPES, ids=lambda n: str(n))
def test_each_weight_is_within_half_a_step(rows: int, columns: int, dtype: torch.dtype) -> None:
    weight = head(rows, columns, dtype, outliers=columns // 50)
    column_scale, _, _ = choose_column_scale(weight)
    q, row_scale = naive.quantise(weight, column_scale, dtype)
    step = row_scale[:, None] * column_scale
    error = (naive.dequantise(q, row_scale, column_scale) - weight.float()).abs()
    assert q.dtype == torch.int8 and int(q.abs().max()) <= 127
    assert bool((error <= 0.5001 * step).all())
    # At most a bfloat16 step is lost to the scale's rounding, so a row's largest code is 126 or 127.
    assert int(q.abs().amax(dim=1).min()) >= 126


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_scale_is_kept_exactly_and_never_clips(dtype: torch.dtype) -> None:
    weight = head(500, 96, dtype)
    _, row_scale = naive.quantise(weight, torch.ones(96), dtype)
    assert torch.equal(row_scale.to(dtype).float(), row_scale)
    # The factor is float32's own rounding of amax / 127.
    assert bool((row_scale * 127 * (1 + 2**-22) >= weight.float().abs().amax(dim=1)).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_round_up_to_is_the_next_number_above(dtype: torch.dtype) -> None:
    value = torch.rand(1000, generator=torch.Generator().manual_seed(0)) + 0.01
    up = naive.round_up_to(value, dtype)
    assert bool((up >= value).all())
    below = torch.nextafter(up.to(dtype), torch.zeros(1000, dtype=dtype)).float()
    assert bool((below < value).all())
    assert torch.equal(naive.round_up_to(up, dtype), up)


def test_row_of_zeros_stays_zero() -> None:
    weight = head(4, 32)
    weight[2] = 0
    q, row_scale = naive.quantise(weight, torch.ones(32))
    assert bool((q[2] == 0).all()) and row_scale[2] == 1


@pytest.mark.parametrize("tokens", [1, 3, 17])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), SHAPES, ids=lambda n: str(n))
def test_cpu_product_agrees_with_naive(tokens: int, rows: int, columns: int, dtype: torch.dtype) -> None:
    quantised = quantise_head(head(rows, columns, dtype, outliers=columns // 50))
    x = hidden(tokens, columns, dtype)
    wanted = naive.logits(x, quantised.q, quantised.row_scale, quantised.column_scale)
    got = int8_linear(x * quantised.column_scale, pad_columns(quantised.q), quantised.row_scale)
    assert got.shape == (tokens, rows) and got.dtype == dtype
    # What is left is the order of float32 additions and one rounding of the result to its type.
    magnitude = naive.logits(x.abs(), quantised.q.abs(), quantised.row_scale, quantised.column_scale)
    tolerance = 1e-5 * magnitude + torch.finfo(dtype).eps * wanted.abs() + 1e-7
    assert bool(((got.float() - wanted).abs() <= tolerance).all())


def test_unpadded_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="expected q from pad_columns"):
        int8_linear(torch.zeros(1, 100), torch.zeros(4, 100, dtype=torch.int8), torch.ones(4))
    with pytest.raises(ValueError, match="expected q from pad_columns"):
        int8_linear(torch.zeros(1, 60), torch.zeros(4, 2 * K_MULTIPLE, dtype=torch.int8), torch.ones(4))


def test_error_against_bf16_is_small() -> None:
    weight = head(2000, 512)
    quantised = quantise_head(weight)
    x = hidden(64, 512, torch.bfloat16)
    wanted = x.float() @ weight.float().T
    got = naive.logits(x, quantised.q, quantised.row_scale, quantised.column_scale)
    # amax of 512 normal weights is about 3.1 sigma: step 3.1/127, error step/sqrt(12) = 0.7 % of sigma.
    assert float((got - wanted).norm() / wanted.norm()) < 0.009
    assert float((got.argmax(1) == wanted.argmax(1)).float().mean()) > 0.95


def test_outlier_columns_are_found_and_help() -> None:
    weight = head(2000, 512, outliers=8)
    plain = relative_error(weight, torch.ones(512))
    column_scale, alpha, error = choose_column_scale(weight)
    assert alpha is not None and int((column_scale != 1).sum()) == 8
    assert error < 0.75 * plain
    quantised = quantise_head(weight)
    assert (quantised.alpha, quantised.outlier_columns) == (alpha, 8)
    assert quantised.error == pytest.approx(relative_error(weight, column_scale), rel=1e-6)


def test_ordinary_head_gets_no_column_scales() -> None:
    quantised = quantise_head(head(2000, 512))
    assert (quantised.alpha, quantised.outlier_columns) == (None, 0)


def test_column_scales_are_powers_of_two_and_exact_on_x() -> None:
    scales = outlier_scales(torch.tensor([1.0, 1.0, 1.0, 5.0, 40.0, 0.5]), alpha=2.0)
    assert scales.tolist() == [1.0, 1.0, 1.0, 2.0, 16.0, 1.0]
    x = hidden(3, 6, torch.bfloat16)
    folded = x * scales.to(torch.bfloat16)
    assert torch.equal(folded.float(), x.float() * scales)


def test_zero_median_scales_nothing() -> None:
    assert torch.equal(outlier_scales(torch.tensor([0.0, 0.0, 3.0]), 2.0), torch.ones(3))


def test_slices_do_not_show() -> None:
    weight = head(3 * LEAST_SLICE + 5, 24, outliers=2)
    quantised = quantise_head(weight)
    q, row_scale = naive.quantise(weight, quantised.column_scale.float(), weight.dtype)
    assert torch.equal(quantised.q, q) and torch.equal(quantised.row_scale.float(), row_scale)
    assert torch.equal(column_amax(weight), weight.float().abs().amax(dim=0))


@pytest.mark.parametrize("rows", [1, LEAST_SLICE, LEAST_SLICE + 1, 248_320])
def test_slices_cover_a_head_in_small_parts(rows: int) -> None:
    parts = list(slices(rows))
    assert [row for part in parts for row in (part.start, part.stop)][1:-1:2] == [part.start for part in parts[1:]]
    assert (parts[0].start, parts[-1].stop) == (0, rows)
    assert max(part.stop - part.start for part in parts) <= max(LEAST_SLICE, rows / SLICES)


def test_codes_go_where_they_are_wanted() -> None:
    weight = head(70, 40)
    wide = torch.full((70, 64), 9, dtype=torch.int8)
    quantised = quantise_head(weight, wide)
    assert (
        quantised.q is wide and torch.equal(wide[:, :40], quantise_head(weight).q) and bool((wide[:, 40:] == 9).all())
    )


def test_heads_are_the_same_when_all_their_numbers_are() -> None:
    weight = head(300, 64)
    other = weight.clone()
    other[299, 63] = -other[299, 63]
    assert same_head(quantise_head(weight), quantise_head(weight.clone()))
    assert not same_head(quantise_head(weight), quantise_head(other))
    assert not same_head(quantise_head(weight), quantise_head(weight[:200]))
    assert not same_head(quantise_head(weight), quantise_head(weight.float()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_digits_come_back_within_half_a_step(dtype: torch.dtype) -> None:
    x = hidden(5, 500, dtype)
    column_scale = torch.ones(500)
    column_scale[3] = 8
    digits, scale = naive.digits(x, column_scale)
    assert digits.dtype == torch.int8 and digits.shape == (5, 2, 500)
    back = scale[:, None] * (256 * digits[:, 0].float() + digits[:, 1].float())
    assert bool(((back - x.float() * column_scale).abs() <= 0.505 * scale[:, None]).all())
    assert float((back - x.float() * column_scale).norm() / (x.float() * column_scale).norm()) < 1e-4


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_raise(bad: float) -> None:
    weight = head(100, 32)
    weight[40, 3] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantise_head(weight)


@pytest.mark.parametrize("weight", [torch.zeros(4, 4, dtype=torch.int8), torch.zeros(4)])
def test_other_weights_are_refused(weight: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"expected \[V, K\]"):
        quantise_head(weight)
