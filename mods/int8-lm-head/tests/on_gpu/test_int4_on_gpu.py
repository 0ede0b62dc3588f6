"""The compiled kernel of rows in 4 bits against naive.py, with every tile size that ships for this GPU."""

from __future__ import annotations

import pytest
import torch
from sparkpin_int8_lm_head import int4, naive
from sparkpin_int8_lm_head.ahead import warm_up
from sparkpin_int8_lm_head.cuda import int4_linear, rehearse_int4
from sparkpin_int8_lm_head.quantise import Int8Head
from sparkpin_int8_lm_head.tuned import tuned_for
from test_int8_on_gpu import GPU, MAJOR, MINOR, SHAPES, TOKENS, head, hidden, poisoned

TUNED = tuned_for(10 * MAJOR + MINOR, bits=4)


def rows_of_4_bits(rows: int, columns: int) -> tuple[Int8Head, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The INT8 head, packed rows of it, their numbers and scales."""
    made = head(rows, columns)
    numbers, row_scale = int4.quantise(made.q, made.row_scale)
    packed = int4.memory(rows, columns, GPU)
    packed.copy_(int4.pack(numbers))
    return made, packed, numbers, row_scale


@pytest.mark.parametrize(("rows", "columns"), SHAPES, ids=lambda n: str(n))
def test_rows_of_4_bits_agree_with_naive(rows: int, columns: int) -> None:
    """The other halves of the bytes, other tokens' digits and what lies behind the last row would all show."""
    made, packed, numbers, row_scale = rows_of_4_bits(rows, columns)
    exact = [numbers.double(), row_scale.double(), made.column_scale.double()]
    for tokens in TOKENS[:-1]:
        x = hidden(tokens, columns, torch.bfloat16)
        out = poisoned(tokens, rows, torch.float32)
        int4_linear(x, packed, row_scale, made.column_scale, TUNED, out)
        wanted = ((x.double() * exact[2]) @ exact[0].T) * exact[1]
        _, scale = naive.digits(x, made.column_scale.float())
        most = 0.502 * scale[:, None] * exact[0].abs().sum(dim=1) * exact[1] + 1e-6 * wanted.abs()
        assert bool(((out - wanted).abs() <= most).all()), tokens


def test_a_cuda_graph_of_rows_of_4_bits_and_nothing_compiled_after_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    made, packed, _, row_scale = rows_of_4_bits(4096, 3072)
    warm_up()
    monkeypatch.setattr("triton.runtime.jit.JITFunction._do_compile", None)
    rehearse_int4(packed, row_scale, made.column_scale, torch.bfloat16, TUNED)
    static = hidden(5, 3072, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = int4_linear(static, packed, row_scale, made.column_scale, TUNED)
    for seed in range(3):
        x = hidden(5 + seed, 3072, torch.bfloat16)[:5]
        static.copy_(x)
        graph.replay()
        assert torch.equal(out, int4_linear(x, packed, row_scale, made.column_scale, TUNED))


def test_a_gpu_makes_the_4_bits_of_a_cpu() -> None:
    """But for rows whose best two shares err alike."""
    made = head(5003, 257)
    numbers, scale = int4.quantise(made.q, made.row_scale)
    wanted, wanted_scale = int4.quantise(made.q.cpu(), made.row_scale.cpu())
    same = (scale.cpu() - wanted_scale).abs() <= 1e-6 * wanted_scale
    assert float(same.float().mean()) > 0.999
    assert float((numbers.cpu() == wanted)[same].float().mean()) > 0.9999
