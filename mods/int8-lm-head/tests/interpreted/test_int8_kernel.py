"""The kernel's arithmetic and masks against naive.py, at small and odd sizes."""

from __future__ import annotations

import pytest
import torch
import triton
from sparkpin_int8_lm_head import naive
from sparkpin_int8_lm_head.cuda import compare, int8_linear, rehearse
from sparkpin_int8_lm_head.kernel import launch_digits, launch_head
from sparkpin_int8_lm_head.layout import ALIGNMENT, READ_AHEAD, lay_out
from sparkpin_int8_lm_head.tuned import Tuned, tile_for
from sparkpin_modkit import ModError

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
    assert triton.knobs.runtime.interpret


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


def error_of_digits(x: torch.Tensor, q: torch.Tensor, row_scale: torch.Tensor, column_scale: torch.Tensor):
    """``[M, V]``: what rounding each activation by half a step can come to."""
    _, scale = naive.digits(x, column_scale)
    return 0.5001 * scale[:, None] * q.float().abs().sum(dim=1) * row_scale


@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "rows", "columns"), SHAPES, ids=lambda n: str(n))
def test_kernels_agree_with_naive(tokens, rows, columns, dtype, with_bias) -> None:
    q, row_scale, column_scale = head(rows, columns)
    x = hidden(tokens, columns, dtype)
    bias = torch.linspace(-3, 3, rows).to(dtype) if with_bias else None
    out = torch.full((tokens, rows), torch.nan, dtype=dtype)
    got = int8_linear(x, q, row_scale.to(torch.bfloat16), column_scale.to(dtype), bias, SMALL, out)
    assert got is out and not bool(out.isnan().any())
    wanted = naive.logits(x, q, row_scale, column_scale) + (0 if bias is None else bias.float())
    # Beside the digits: float32 additions in another order (naive's), and one rounding of the result to its type.
    magnitude = naive.logits(x.abs(), q.abs(), row_scale, column_scale)
    tolerance = (
        error_of_digits(x, q, row_scale, column_scale) + 1e-5 * magnitude + torch.finfo(dtype).eps * wanted.abs()
    )
    assert bool(((out.float() - wanted).abs() <= tolerance).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 33, 4096, 5000])
def test_digits_are_naive_s(columns: int, dtype: torch.dtype) -> None:
    x = hidden(3, columns, dtype)
    x[1] *= 100
    x[2] = 0
    column_scale = torch.ones(columns)
    column_scale[0] = 16
    width = columns + -columns % ALIGNMENT
    digits = torch.full((3, 2, width), 99, dtype=torch.int8)
    scale = torch.full((3,), torch.nan)
    launch_digits(digits, scale, x, column_scale.to(dtype))
    wanted, wanted_scale = naive.digits(x, column_scale)
    torch.testing.assert_close(scale, wanted_scale, rtol=1e-6, atol=0)
    number = 256 * digits[:, 0, :columns].int() + digits[:, 1, :columns].int()
    # A quotient half-way between two whole numbers may go either way.
    assert int((number - (256 * wanted[:, 0].int() + wanted[:, 1].int())).abs().max()) <= 1
    assert bool((digits[:, :, columns:] == 0).all()) and bool((digits[2] == 0).all())
    assert int(digits[0, 0].abs().max()) == int(digits[1, 0].abs().max()) == 127


def test_a_token_s_logits_do_not_depend_on_the_others() -> None:
    q, row_scale, column_scale = head(33, 130)
    x = hidden(40, 130, torch.bfloat16)
    together = int8_linear(x, q, row_scale, column_scale, None, SMALL)
    for tokens in (1, 9, 17):
        assert torch.equal(int8_linear(x[:tokens], q, row_scale, column_scale, None, SMALL), together[:tokens])


def test_whole_numbers_are_added_up_exactly() -> None:
    """300 products of the largest numbers, and one less: the result is exact to the last digit."""
    columns = 300
    q = lay_out(16, columns, torch.device("cpu"))
    q.fill_(127)
    q[1, 7] = 126
    digits = torch.zeros(1, 2, q.stride(0), dtype=torch.int8)
    digits[:, 0, :columns] = 127
    out = torch.full((1, 16), torch.nan)
    launch_head(out, digits, torch.tensor([2.0**-8]), q, torch.ones(16), None, SMALL[8])
    assert out[0, :3].tolist() == [300 * 127 * 127, 300 * 127 * 127 - 127, 300 * 127 * 127]


def test_float32_logits_are_not_rounded() -> None:
    q, row_scale, column_scale = head(33, 40)
    x = hidden(5, 40, torch.bfloat16)
    out = torch.full((5, 33), torch.nan)
    int8_linear(x, q, row_scale, column_scale, None, SMALL, out)
    assert float((out - naive.logits(x, q, row_scale, column_scale)).norm() / out.norm()) < 1e-4


def test_every_code_comes_out() -> None:
    """-127 to 127, one for each row; a token's largest component has digits 127 and 0, so 1 and -2 are exact."""
    q = lay_out(255, 16, torch.device("cpu"))
    q[:, 0] = torch.arange(-127, 128, dtype=torch.int8)
    x = torch.zeros(2, 16, dtype=torch.bfloat16)
    x[0, 0], x[1, 0] = 1, -2
    out = int8_linear(x, q, torch.ones(255), None, None, SMALL)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, torch.stack([q[:, 0], -2 * q[:, 0].int()]).float(), rtol=1e-6, atol=0)


def test_logits_of_very_many_tokens_are_of_the_model_s_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparkpin_int8_lm_head.cuda.FLOAT32_TOKENS", 2)
    q, row_scale, _ = head(20, 33)
    x = hidden(3, 33, torch.bfloat16)
    few, many = (int8_linear(x[:tokens], q, row_scale, None, None, SMALL) for tokens in (2, 3))
    assert (few.dtype, many.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(many[:2].float(), few, rtol=2**-7, atol=0)  # the interpreter rounds towards zero
    sampled = int8_linear(x[:2], q, row_scale, None, None, SMALL, float32=False)
    assert sampled.dtype == torch.bfloat16 and torch.equal(sampled, many[:2])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_token_that_is_not_finite_gives_nan_and_no_other(bad: float) -> None:
    q, row_scale, _ = head(20, 33)
    x = hidden(3, 33, torch.bfloat16)
    x[1, 30] = bad
    out = int8_linear(x, q, row_scale, None, None, SMALL)
    assert bool(out[1].isnan().all()) and not bool(out[[0, 2]].isnan().any())


def test_a_token_of_zeros_gives_zeros() -> None:
    q, row_scale, _ = head(20, 33)
    assert bool((int8_linear(torch.zeros(2, 33, dtype=torch.float16), q, row_scale, None, None, SMALL) == 0).all())


ROWS, COLUMNS = 1400, 66


@pytest.fixture(scope="module")
def tall() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """More rows than the rehearsal looks at."""
    return head(ROWS, COLUMNS)


def without_low_digit(out, digits, *rest) -> None:
    digits = digits.clone()
    digits[:, 1] = 0
    launch_head(out, digits, *rest)


def spoils(rows: slice):
    def launch(out, *rest) -> None:
        launch_head(out, *rest)
        out[:, rows] = out[:, rows] * 1.2 + 1e-3

    return launch


FAULTS = {
    "another number": lambda out, *_: out.fill_(0.5),
    "no low digit": without_low_digit,
    "NaN in one row": lambda out, *rest: (launch_head(out, *rest), out[:, 1].fill_(torch.nan)),
    "first row": spoils(slice(0, 1)),
    "last row": spoils(slice(ROWS - 1, ROWS)),
    "a tile within": spoils(slice(700, 716)),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("float32", [True, False], ids=["float32", "16 bits"])
def test_rehearsal_notices_a_kernel_that_computes_something_else(tall, fault, float32, monkeypatch) -> None:
    q, row_scale, column_scale = tall
    monkeypatch.setattr("sparkpin_int8_lm_head.cuda.launch_head", FAULTS[fault])
    with pytest.raises(ModError, match=r"for 3 tokens the kernel differs .* by .*expected less than .*LM_HEAD=0, or"):
        rehearse(q, row_scale, column_scale.bfloat16(), None, torch.bfloat16, {8: SMALL[8]}, float32=float32)


def test_rehearsal_compares_a_masked_tile_each_size_and_two_tiles(tall) -> None:
    q, row_scale, _ = tall
    assert [tokens for tokens, *_ in compare(q, row_scale, None, None, torch.bfloat16, SMALL)] == [3, 8, 16, 17]


def test_rehearsal_looks_at_each_tile_of_a_large_vocabulary(monkeypatch) -> None:
    q, row_scale, _ = head(20_000, 16)
    spoilt = 0

    def linear(x, *_, **__):
        out = naive.logits(x, q, row_scale, torch.ones(16))
        out[:, spoilt : spoilt + SMALL[8].block_v] *= 1.5
        return out

    monkeypatch.setattr("sparkpin_int8_lm_head.cuda.int8_linear", linear)
    for spoilt in range(0, 20_000, 11 * SMALL[8].block_v):  # noqa: B007
        with pytest.raises(ModError):
            rehearse(q, row_scale, None, None, torch.bfloat16, {8: SMALL[8]})


@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("float32", [True, False], ids=["float32", "16 bits"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rehearsal_lets_a_sound_kernel_through(dtype, float32, with_bias) -> None:
    """The interpreter rounds to 16 bits towards zero, so with twice the error of a GPU."""
    q, row_scale, column_scale = head(200, 33)
    column_scale[0] = 64  # a column that leaves the other components few digits
    bias = torch.ones(200, dtype=dtype) if with_bias else None
    rehearse(q, row_scale, column_scale.to(dtype), bias, dtype, SMALL, float32=float32)


def test_no_tokens_give_no_logits() -> None:
    q, row_scale, _ = head(20, 33)
    assert int8_linear(torch.empty(0, 33, dtype=torch.bfloat16), q, row_scale, None, None, SMALL).shape == (0, 20)


def test_a_view_is_made_contiguous() -> None:
    q, row_scale, _ = head(20, 33)
    wide = hidden(3, 66, torch.float16)
    assert torch.equal(
        int8_linear(wide[:, ::2], q, row_scale, None, None, SMALL),
        int8_linear(wide[:, ::2].contiguous(), q, row_scale, None, None, SMALL),
    )


@pytest.mark.parametrize(
    "x", [torch.zeros(2, 33), torch.zeros(2, 32, dtype=torch.bfloat16), torch.zeros(33, dtype=torch.bfloat16)]
)
def test_other_inputs_are_refused(x: torch.Tensor) -> None:
    q, row_scale, _ = head(20, 33)
    with pytest.raises(ValueError, match=r"expected \[B, K\] in 16 bits"):
        int8_linear(x, q, row_scale, None, None, SMALL)


def test_rows_lie_aligned_and_the_last_may_be_read_past() -> None:
    q = lay_out(5, 33, torch.device("cpu"))
    assert q.shape == (5, 33) and q.stride() == (48, 1) and 48 % ALIGNMENT == 0
    assert q.untyped_storage().nbytes() >= 5 * 48 + READ_AHEAD
    assert bool((q == 0).all())


@pytest.mark.parametrize(("tokens", "size"), [(1, 8), (8, 8), (9, 16), (16, 16), (17, 16), (1000, 16)])
def test_the_smallest_tile_that_holds_the_tokens_is_taken(tokens: int, size: int) -> None:
    assert tile_for(tokens, SMALL).block_b == size
