"""The kernel's arithmetic and masks against naive.py, at small and odd sizes."""

from __future__ import annotations

import pytest
import torch
from sparkpin_int8_lm_head import kernel, naive
from sparkpin_int8_lm_head.cuda import int8_linear
from sparkpin_int8_lm_head.layout import ALIGNMENT, READ_AHEAD, lay_out
from sparkpin_int8_lm_head.tuned import Tuned, tile_for

SMALL = {8: Tuned(8, 16, 32, 4, 2), 16: Tuned(16, 32, 64, 4, 3)}
DTYPES = [torch.bfloat16, torch.float16]
# Each of tokens, rows and columns below, at and above a tile's edge; columns that are no multiple of anything.
SHAPES = [
    (1, 16, 32),
    (1, 1, 1),
    (3, 17, 33),
    (8, 48, 64),
    (9, 31, 100),
    (16, 64, 130),
    (17, 33, 48),
    (40, 50, 257),
]


@pytest.fixture(scope="module", autouse=True)
def interpreter() -> None:
    assert kernel.INTERPRETED


def head(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    weight = torch.randn(rows, columns, generator=generator)
    column_scale = torch.ones(columns)
    column_scale[:: max(1, columns // 3)] = 4.0
    q, row_scale = naive.quantise(weight * column_scale, column_scale, torch.bfloat16)
    laid = lay_out(rows, columns, torch.device("cpu"))
    laid.copy_(q)
    # What is read beyond a row must not matter, so it is not left at zero here.
    memory = torch.as_strided(laid, (rows * laid.stride(0) + READ_AHEAD,), (1,))
    beyond = torch.ones_like(memory, dtype=torch.bool)
    torch.as_strided(beyond, laid.shape, laid.stride()).fill_(False)
    memory[beyond] = 113
    return laid, row_scale, column_scale


def hidden(tokens: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(tokens, columns, generator=torch.Generator().manual_seed(5)).to(dtype)


@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "rows", "columns"), SHAPES, ids=lambda n: str(n))
def test_kernel_agrees_with_naive(tokens, rows, columns, dtype, with_bias) -> None:
    q, row_scale, column_scale = head(rows, columns)
    x = hidden(tokens, columns, dtype)
    bias = torch.linspace(-3, 3, rows).to(dtype) if with_bias else None
    out = torch.full((tokens, rows), torch.nan, dtype=dtype)
    got = int8_linear(x * column_scale.to(dtype), q, row_scale.to(torch.bfloat16), bias, SMALL, out)
    assert got is out and not bool(out.isnan().any())
    wanted = naive.logits(x, q, row_scale, column_scale) + (0 if bias is None else bias.float())
    magnitude = naive.logits(x.abs(), q.abs(), row_scale, column_scale)
    # What is left is the order of float32 additions and one rounding of the result to its type.
    assert bool(((out.float() - wanted).abs() <= 1e-5 * magnitude + torch.finfo(dtype).eps * wanted.abs()).all())


def test_float32_logits_are_not_rounded() -> None:
    q, row_scale, column_scale = head(33, 40)
    x = hidden(5, 40, torch.bfloat16)
    out = torch.full((5, 33), torch.nan)
    int8_linear(x * column_scale.bfloat16(), q, row_scale, None, SMALL, out)
    torch.testing.assert_close(out, naive.logits(x, q, row_scale, column_scale), rtol=1e-5, atol=1e-5)


def test_integers_come_out_exactly() -> None:
    """Every INT8 number, once for each row: the sums are small integers, which float32 and bfloat16 hold."""
    q = lay_out(255, 16, torch.device("cpu"))
    q[:, 0] = torch.arange(-127, 128, dtype=torch.int8)
    x = torch.zeros(2, 16, dtype=torch.bfloat16)
    x[0, 0], x[1, 0] = 1, -2
    out = int8_linear(x, q, torch.ones(255), None, SMALL)
    assert torch.equal(out[0].float(), q[:, 0].float()) and torch.equal(out[1].float(), -2 * q[:, 0].float())


def test_nan_of_one_token_stays_there() -> None:
    q, row_scale, _ = head(20, 33)
    x = hidden(2, 33, torch.bfloat16)
    x[1] = torch.nan
    out = int8_linear(x, q, row_scale, None, SMALL)
    assert not bool(out[0].isnan().any()) and bool(out[1].isnan().all())


def test_no_tokens_give_no_logits() -> None:
    q, row_scale, _ = head(20, 33)
    assert int8_linear(torch.empty(0, 33, dtype=torch.bfloat16), q, row_scale, None, SMALL).shape == (0, 20)


def test_a_view_is_made_contiguous() -> None:
    q, row_scale, _ = head(20, 33)
    wide = hidden(3, 66, torch.float16)
    assert torch.equal(
        int8_linear(wide[:, ::2], q, row_scale, None, SMALL),
        int8_linear(wide[:, ::2].contiguous(), q, row_scale, None, SMALL),
    )


@pytest.mark.parametrize(
    "x", [torch.zeros(2, 33), torch.zeros(2, 32, dtype=torch.bfloat16), torch.zeros(33, dtype=torch.bfloat16)]
)
def test_other_inputs_are_refused(x: torch.Tensor) -> None:
    q, row_scale, _ = head(20, 33)
    with pytest.raises(ValueError, match=r"wanted \[B, K\] in 16 bits"):
        int8_linear(x, q, row_scale, None, SMALL)


def test_rows_lie_aligned_and_the_last_may_be_read_past() -> None:
    q = lay_out(5, 33, torch.device("cpu"))
    assert q.shape == (5, 33) and q.stride() == (48, 1) and 48 % ALIGNMENT == 0
    assert q.untyped_storage().nbytes() >= 5 * 48 + READ_AHEAD
    assert bool((q == 0).all())


@pytest.mark.parametrize(("tokens", "size"), [(1, 8), (8, 8), (9, 16), (16, 16), (17, 16), (1000, 16)])
def test_the_smallest_tile_that_holds_the_tokens_is_taken(tokens: int, size: int) -> None:
    assert tile_for(tokens, SMALL).block_b == size
