"""The kernel of rows in 4 bits against naive.py, at small and odd sizes."""

from __future__ import annotations

import pytest
import torch
from sparkpin_int8_lm_head import cuda, int4, naive
from sparkpin_int8_lm_head.kernel import launch_int4
from sparkpin_int8_lm_head.layout import READ_AHEAD
from sparkpin_int8_lm_head.tuned import Tuned
from sparkpin_modkit import ModError

SMALL = {8: Tuned(8, 16, 16, 4, 2, bits=4), 16: Tuned(16, 32, 32, 4, 3, bits=4)}
SHAPES = [(1, 16, 32), (1, 1, 1), (3, 17, 33), (9, 31, 100), (17, 33, 130), (40, 50, 257)]


def head(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packed rows, their numbers and scales. What lies between rows and behind them is not left at zero."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * 1000 + columns))
    column_scale = torch.ones(columns)
    column_scale[:: max(1, columns // 3)] = 4.0
    numbers, row_scale = int4.quantise(*naive.quantise(weight * column_scale, column_scale, torch.bfloat16))
    packed = int4.memory(rows, columns, torch.device("cpu"))
    whole = torch.as_strided(packed, (rows * packed.stride(0) + READ_AHEAD,), (1,))
    whole.fill_(113)
    packed.copy_(int4.pack(numbers))
    return packed, numbers, row_scale, column_scale


def hidden(tokens: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(tokens, columns, generator=torch.Generator().manual_seed(5)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("tokens", "rows", "columns"), SHAPES, ids=lambda n: str(n))
def test_the_kernel_agrees_with_naive(tokens: int, rows: int, columns: int, dtype: torch.dtype) -> None:
    packed, numbers, row_scale, column_scale = head(rows, columns)
    x = hidden(tokens, columns, dtype)
    out = torch.full((tokens, rows), torch.nan)
    assert cuda.int4_linear(x, packed, row_scale, column_scale.to(dtype), SMALL, out) is out
    wanted = naive.logits(x, numbers, row_scale, column_scale)
    _, step = naive.digits(x, column_scale)
    tolerance = 0.5001 * step[:, None] * numbers.float().abs().sum(dim=1) * row_scale
    magnitude = naive.logits(x.abs(), numbers.abs(), row_scale, column_scale)
    assert bool(((out - wanted).abs() <= tolerance + 1e-5 * magnitude).all())


def test_every_code_comes_out_of_either_half_of_a_byte() -> None:
    """A token's largest component has digits 127 and 0, so 1 and -2 are exact."""
    numbers = torch.zeros(32, 33, dtype=torch.int8)
    numbers[:16, 0] = numbers[16:, 32] = torch.arange(-120, 121, 16, dtype=torch.int8)
    packed = int4.memory(32, 33, torch.device("cpu"))
    packed.copy_(int4.pack(numbers))
    x = torch.zeros(2, 33, dtype=torch.bfloat16)
    x[0, 0], x[1, 32] = 1, -2
    out = cuda.int4_linear(x, packed, torch.ones(32), None, SMALL)
    wanted = torch.arange(-120.0, 121, 16)
    torch.testing.assert_close(out[0, :16], wanted, rtol=1e-6, atol=0)
    torch.testing.assert_close(out[1, 16:], -2 * wanted, rtol=1e-6, atol=0)


def test_no_tokens_give_no_logits_and_other_inputs_are_refused() -> None:
    packed, _, row_scale, _ = head(20, 33)
    assert cuda.int4_linear(torch.empty(0, 33).bfloat16(), packed, row_scale, None, SMALL).shape == (0, 20)
    for x in (torch.zeros(2, 33), torch.zeros(2, 32).bfloat16(), torch.zeros(33).bfloat16()):
        with pytest.raises(ValueError, match=r"expected \[B, K\] in 16 bits and \[V, half of K\]"):
            cuda.int4_linear(x, packed, row_scale, None, SMALL)


def test_rehearsal_notices_a_kernel_that_computes_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, _, row_scale, column_scale = head(200, 66)
    compared = list(cuda.compare_int4(packed, row_scale, column_scale, torch.bfloat16, SMALL))
    assert [tokens for tokens, *_ in compared] == [3, 8, 16, 17]
    cuda.rehearse_int4(packed, row_scale, column_scale, torch.bfloat16, SMALL)

    def halves_exchanged(out, digits, scale, packed, *rest) -> None:
        exchanged = torch.empty_strided(packed.shape, packed.stride(), dtype=torch.int8)
        launch_int4(out, digits, scale, exchanged.copy_((packed << 4) | ((packed >> 4) & 15)), *rest)

    monkeypatch.setattr(cuda, "launch_int4", halves_exchanged)
    with pytest.raises(ModError, match=r"rows of 4 bits: for \d+ tokens .* leave draft_head out of"):
        cuda.rehearse_int4(packed, row_scale, column_scale, torch.bfloat16, SMALL)
