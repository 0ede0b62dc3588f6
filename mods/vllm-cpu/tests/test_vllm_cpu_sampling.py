"""Sampling parameters of requests that draft, through vLLM's own rejection sampler with the platform's kernels."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from sparkpin_vllm_cpu import sampling
from vllm.platforms import current_platform
from vllm.utils import cpu_triton_utils
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.ops import topk_topp_sampler

TEMPERATURE = torch.tensor([0.7, 0.0, 1.3, 0.25])
TOP_K = torch.tensor([20, 1024, 1, 5], dtype=torch.int32)
TOP_P = torch.tensor([0.95, 1.0, 0.1, 0.5])
DRAFTS = [2, 0, 1, 2]
LAST = torch.tensor(DRAFTS, dtype=torch.int32).cumsum(0, dtype=torch.int32)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM with the override, registered the way its worker does it after the plugins are loaded."""
    sampling.install()
    current_platform.register_triton_kernel_overrides()
    yield
    monkeypatch.undo()
    current_platform.register_triton_kernel_overrides()


class Poisoned(torch.Tensor):
    """Its ``new_empty`` holds what no sampling parameter may be; real memory's old content is a matter of luck."""

    def new_empty(self, *size: int) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).new_full(size, -7)


def expand(values: torch.Tensor, **replace: int) -> list[float]:
    poisoned = values.as_subclass(Poisoned)
    return rejection_sampler.expand_batch_to_tokens(poisoned, LAST, sum(DRAFTS), **replace).tolist()


def test_vllm_still_needs_expand() -> None:
    """When this fails, vLLM writes the caller's tensor: the override may go."""
    output = torch.full((5,), -7, dtype=torch.int32)
    cpu_triton_utils._expand_kernel_impl(output, TOP_K, LAST, 0, 0)
    assert output.tolist() == [-7] * 5


def test_vllm_still_needs_apply_top_k_only() -> None:
    """When this fails, vLLM knows steps without drafts: the override may go."""
    with pytest.raises(RuntimeError, match=r"numel\(\) == 0"):
        topk_topp_sampler.apply_top_k_only(torch.empty(0, 8), torch.empty(0, dtype=torch.int32))


def test_greedy_requests_get_the_replacement(installed: None) -> None:
    greedy = torch.tensor([0.7, 1.0, 0.0, 0.5])
    assert expand(greedy, replace_from=0, replace_to=1) == pytest.approx([0.7, 0.7, 1.0, 0.5, 0.5])


def test_what_lies_beyond_the_last_token_is_left() -> None:
    output = torch.full((8,), -7.0)
    sampling.expand(output, TOP_P, LAST.long(), 0, 0)
    assert output[5:].tolist() == [-7.0] * 3
    empty = torch.empty(0)
    sampling.expand(empty, TOP_P[:0], LAST[:0], 0, 0)


def test_sampling_constraints(installed: None) -> None:
    """Temperature, top_k and top_p of each row, against the same by hand."""
    temperature = torch.tensor([0.5, 0.0, 2.0, 1.0])
    metadata = SimpleNamespace(
        all_greedy=False,
        temperature=temperature.as_subclass(Poisoned),
        top_k=torch.tensor([2, 8, 3, 8], dtype=torch.int32).as_subclass(Poisoned),
        top_p=torch.tensor([1.0, 1.0, 1.0, 1e-6]).as_subclass(Poisoned),
    )
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    wanted = logits / torch.tensor([0.5, 0.5, 2.0, 1.0, 1.0]).unsqueeze(1)
    for row, kept in enumerate((2, 2, 3, 1, 1)):
        wanted[row, wanted[row].argsort(descending=True)[kept:]] = -torch.inf
    seen = rejection_sampler.apply_sampling_constraints(logits.clone(), LAST, metadata)
    assert torch.equal(seen, wanted)


@pytest.mark.parametrize("top_k", [None, TOP_K[:1]], ids=["any", "top_k"])
@pytest.mark.parametrize("top_p", [None, TOP_P[:1]], ids=["any", "top_p"])
def test_a_step_without_drafts(installed: None, top_k: torch.Tensor | None, top_p: torch.Tensor | None) -> None:
    metadata = SimpleNamespace(all_greedy=False, temperature=TEMPERATURE[:1], top_k=top_k, top_p=top_p)
    none = torch.zeros(1, dtype=torch.int32)
    assert rejection_sampler.apply_sampling_constraints(torch.empty(0, 1024), none, metadata).shape == (0, 1024)


def test_top_k_alone(installed: None) -> None:
    seen = topk_topp_sampler.apply_top_k_top_p(torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([2]), None)
    assert seen.tolist() == [[-torch.inf, 3.0, 2.0]]
