"""What vLLM does with the head of a second model that drafts, through its own code for that."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import sparkpin_int8_lm_head
import torch
from sparkpin_int8_lm_head import int4, method, naive
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.v1.spec_decode import llm_base_proposer
from vllm.v1.worker.gpu.spec_decode.eagle import utils


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, unregistered: None, world: object) -> None:
    original = ParallelLMHead.__init__
    monkeypatch.setattr(ParallelLMHead, "__init__", getattr(original, "__wrapped__", original))
    sparkpin_int8_lm_head.register()


def head(seed: int | None) -> ParallelLMHead:
    """As loaded; seed: of its weights, None for a drafter that has none."""
    made = ParallelLMHead(500, 128, params_dtype=torch.bfloat16)
    if seed is not None:
        weight = torch.randn(500, 128, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
        made.weight.weight_loader(made.weight, weight)
    made.quant_method.process_weights_after_loading(made)
    return made


def drafter(seed: int | None) -> torch.nn.Module:
    made = torch.nn.Module()
    made.has_own_lm_head, made.lm_head, made.model = seed is not None, head(seed), torch.nn.Module()
    return made


CASES = pytest.mark.parametrize(("own", "shared"), [(1, True), (2, False), (None, True)], ids=["copy", "own", "none"])


@CASES
def test_the_runner_of_a_gpu_shares_a_head_that_is_the_target_s(installed, own: int | None, shared: bool) -> None:
    """EAGLE-3, DFlash and DSpark: `_should_share` reads `weight` of both."""
    target, second = head(1), drafter(own)
    assert utils._should_share(second, "has_own_lm_head", second.lm_head, target) is shared


@CASES
def test_the_older_runner_does_so_too(installed, own: int | None, shared: bool) -> None:
    target, second = torch.nn.Module(), drafter(own)
    target.lm_head, target.model = head(1), torch.nn.Module()
    settings = SimpleNamespace(speculative_config=None)
    self = SimpleNamespace(model=second, vllm_config=settings, use_local_argmax_reduction=False)
    llm_base_proposer.SpecDecodeBaseProposer._maybe_share_lm_head(self, target)
    assert (second.lm_head is target.lm_head) is shared
    x = torch.ones(1, 128, dtype=torch.bfloat16)
    said = second.lm_head.quant_method.apply(second.lm_head, x)
    assert torch.equal(said, target.lm_head.quant_method.apply(target.lm_head, x)) is shared


def test_a_drafter_without_a_head_costs_no_memory(installed) -> None:
    empty = head(None)
    assert not list(empty.parameters()) and not list(empty.buffers()) and empty not in method._heads


def test_no_two_heads_have_one_number(installed) -> None:
    first, second, empty = head(1), head(2), head(None)
    assert len({int(one.weight) for one in (first, second, empty)}) == 3
    assert int(head(1).weight) == int(first.weight)


def test_rows_in_4_bits_are_packed_for_a_gpu_and_the_same_numbers_on_a_cpu(installed, monkeypatch) -> None:
    """The kernel's side of it stands in, as it needs Triton."""
    tried = []

    def int4_linear(x, packed, row_scale, column_scale, tuned) -> torch.Tensor:
        scale = torch.ones(128) if column_scale is None else column_scale.float()
        return naive.logits(x, int4.unpack(packed, 128), row_scale, scale)

    kernels = SimpleNamespace(int4_linear=int4_linear, rehearse_int4=lambda *what: tried.append(what))
    monkeypatch.setattr(sparkpin_int8_lm_head, "cuda", kernels, raising=False)
    made, index, on_cpu, on_gpu = head(1), torch.arange(499, 435, -1), torch.nn.Module(), torch.nn.Module()
    of = made.quant_method
    of.select_rows(made, index, on_cpu, bits=4)
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    wanted, whole = of.apply(on_cpu, x).float(), of.apply(made, x).float()[:, index]
    of.tuned, of.tuned_int4 = {8: None}, {16: None}
    of.select_rows(made, index, on_gpu, bits=4)
    assert on_gpu.weight_int4.shape == (64, 64) and on_gpu.weight_row_scale.dtype == torch.float32
    assert torch.equal(int4.unpack(on_gpu.weight_int4, 128), on_cpu.weight_int8[:, :128])
    assert [what[-1] for what in tried] == [{16: None}]
    torch.testing.assert_close(of.apply(on_gpu, x), wanted, rtol=0.02, atol=0.02 * float(wanted.std()))
    error = (wanted - whole).norm() / whole.norm()
    assert 0.05 < float(error) < 0.15
    biased = of.apply(on_gpu, x, torch.ones(64))
    assert torch.equal(biased, of.apply(on_gpu, x) + 1)
