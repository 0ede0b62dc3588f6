"""The compiled kernels against naive.py, at real and odd sizes, with every tile size that ships for this GPU."""

from __future__ import annotations

import pytest
import torch
from sparkpin_int8_lm_head import naive, selfcheck
from sparkpin_int8_lm_head.ahead import warm_up
from sparkpin_int8_lm_head.cuda import int8_linear, rehearse
from sparkpin_int8_lm_head.layout import lay_out
from sparkpin_int8_lm_head.quantise import Int8Head, quantise_head
from sparkpin_int8_lm_head.tuned import tuned_for
from sparkpin_modkit.selfcheck import timed

GPU = torch.device("cuda")
MAJOR, MINOR = torch.cuda.get_device_capability()
TUNED = tuned_for(10 * MAJOR + MINOR)
TOKENS = [1, 2, 3, 5, 7, 8, 9, 16, 17, 31, 33, 48, 64, 65, 96, 100, 127, 128, 129, 136, 192, 224, 256, 300, 1025]
# Rows as vLLM pads them and not; columns of Qwen3.5, gpt-oss, a tiny model, and none of anything's.
SHAPES = [(64, 64), (1000, 130), (4096, 3072), (24_832, 2880), (5003, 257), (200, 5120), (1, 1)]


def head(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Int8Head:
    generator = torch.Generator(device=GPU).manual_seed(rows + columns)
    weight = torch.randn(rows, columns, generator=generator, device=GPU) * 0.02
    weight[:, :: max(1, columns // 3)] *= 8
    return quantise_head(weight.to(dtype), lay_out(rows, columns, GPU))


def hidden(tokens: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(tokens, columns, generator=torch.Generator(device=GPU).manual_seed(tokens), device=GPU).to(dtype)


def poisoned(tokens: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((tokens, rows), torch.nan, dtype=dtype, device=GPU)


@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "columns"), SHAPES, ids=lambda n: str(n))
def test_kernels_agree_with_naive(rows: int, columns: int, dtype: torch.dtype, with_bias: bool) -> None:
    made = head(rows, columns, dtype)
    bias = torch.linspace(-3, 3, rows, device=GPU).to(dtype) if with_bias else None
    exact = [made.q.double(), made.row_scale.double(), made.column_scale.double()]
    for tokens in TOKENS:
        x = hidden(tokens, columns, dtype)
        out = poisoned(tokens, rows, torch.float32)
        int8_linear(x, made.q, made.row_scale, made.column_scale, bias, TUNED, out)
        wanted = ((x.double() * exact[2]) @ exact[0].T) * exact[1] + (0 if bias is None else bias.double())
        _, scale = naive.digits(x, made.column_scale.float())
        most = 0.502 * scale[:, None] * exact[0].abs().sum(dim=1) * exact[1] + 1e-6 * wanted.abs()
        assert bool(((out - wanted).abs() <= most).all()), tokens
        rounded = int8_linear(x, made.q, made.row_scale, made.column_scale, bias, TUNED, poisoned(tokens, rows, dtype))
        assert torch.equal(rounded, out.to(dtype)), tokens


def test_a_token_s_logits_do_not_depend_on_the_others() -> None:
    """Whole numbers add up to the same in any order: bit for bit, whatever the tile size."""
    made = head(4096, 3072)
    x = hidden(1000, 3072, torch.bfloat16)
    together = int8_linear(x, made.q, made.row_scale, made.column_scale, None, TUNED)
    for tokens in TOKENS[:-1]:
        some = int8_linear(x[:tokens], made.q, made.row_scale, made.column_scale, None, TUNED)
        assert torch.equal(some, together[:tokens]), tokens


def test_cuda_graph_replays_with_other_inputs() -> None:
    made = head(4096, 3072)
    static = hidden(5, 3072, torch.bfloat16)
    rehearse(made.q, made.row_scale, made.column_scale, None, torch.bfloat16, TUNED)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = int8_linear(static, made.q, made.row_scale, made.column_scale, None, TUNED)
    for seed in range(3):
        x = hidden(5 + seed, 3072, torch.bfloat16)[:5]
        static.copy_(x)
        graph.replay()
        assert torch.equal(out, int8_linear(x, made.q, made.row_scale, made.column_scale, None, TUNED))


def test_inputs_that_lie_anywhere() -> None:
    made = head(1000, 130)
    wide = hidden(3, 261, torch.float16)
    for x in (wide[:, ::2][:, :130], wide[:, 1:131], wide.flatten()[1:391].view(3, 130)):
        got = int8_linear(x, made.q, made.row_scale, made.column_scale, None, TUNED)
        assert torch.equal(
            got, int8_linear(x.contiguous().clone(), made.q, made.row_scale, made.column_scale, None, TUNED)
        )


@pytest.mark.parametrize("float32", [True, False], ids=["float32", "16 bits"])
def test_nothing_is_compiled_for_a_request_after_warm_up(float32: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variants that warm_up compiles from mock tensors are those that real ones want."""
    made = head(8192, 3072)
    warm_up(biases=(False, True), float32=float32)
    monkeypatch.setattr("triton.runtime.jit.JITFunction._do_compile", None)
    bias = torch.ones(8192, device=GPU, dtype=torch.bfloat16)
    for tokens in TOKENS:
        for dtype in (torch.bfloat16, torch.float16):
            x = hidden(tokens, 3072, dtype)
            for scale in (None, made.column_scale.to(dtype)):
                for one in (None, bias.to(dtype)):
                    int8_linear(x, made.q, made.row_scale.to(dtype), scale, one, TUNED, float32=float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(5003, 257), (4096, 3072), (200, 5120)], ids=lambda n: str(n))
def test_a_gpu_quantises_to_the_bytes_of_a_cpu(rows: int, columns: int, dtype: torch.dtype) -> None:
    """With weights whose row scales are exact quotients, or lie next to one, and columns about to be scaled or not."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(rows, columns, generator=generator) * torch.exp(torch.randn(columns, generator=generator))
    weight[::3] *= 127 / weight[::3].abs().amax(dim=1, keepdim=True)
    weight = weight.to(dtype)
    ours, wanted = quantise_head(weight.to(GPU)), quantise_head(weight)
    assert ours.alpha == wanted.alpha is not None
    assert torch.equal(ours.q.cpu(), wanted.q) and torch.equal(ours.row_scale.cpu(), wanted.row_scale)
    assert torch.equal(ours.column_scale.cpu(), wanted.column_scale)


def test_quantising_needs_little_memory_beside_the_result() -> None:
    weight = torch.randn(248_320, 3072, device=GPU, dtype=torch.bfloat16)
    q = lay_out(*weight.shape, GPU)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    quantise_head(weight, q)
    extra = torch.cuda.max_memory_allocated() - before
    print(f"\npeak extra memory: {extra / weight.nbytes:.2%} of the head")
    assert extra < 0.05 * weight.nbytes


def test_the_self_check_passes_far_below_its_bound() -> None:
    found = list(timed(selfcheck.check()))
    print("", *found, sep="\n")
    heads = [one.kernel for one in found]
    assert heads == ["int8 head"] * (len(TUNED) + 2) + ["int4 head"] * (len(TUNED) + 2)
    assert all(one.error < one.bound / 5 for one in found)
