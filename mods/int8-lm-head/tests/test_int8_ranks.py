"""A head in shards, in two real processes: what vLLM gathers from both, against the whole head in one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import sparkpin_int8_lm_head
import torch
from sparkpin_modkit.testing import on_ranks, vllm_rank
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

VOCABULARY, WIDTH = 500, 100


def head_weight() -> torch.Tensor:
    """Columns that are far out in one half of the vocabulary alone, so that halves and whole differ in their scales."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator) * 0.02
    weight[:256, 5] *= 30
    weight[256:, [7, 9]] *= 30
    return weight.bfloat16()


def logits(rank: int, size: int, meeting: str) -> Any:
    """Gathered on rank 0, None elsewhere; which columns are scaled here."""
    sparkpin_int8_lm_head.register()
    with vllm_rank(rank, size, meeting) as config:
        config.model_config = SimpleNamespace(head_dtype=None)
        head = ParallelLMHead(VOCABULARY, WIDTH, params_dtype=torch.bfloat16)
        head.weight.weight_loader(head.weight, head_weight())
        head.quant_method.process_weights_after_loading(head)
        x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
        got = LogitsProcessor(VOCABULARY)(head, x)
        scaled = (head.weight_column_scale != 1).nonzero().flatten().tolist()
        return got if got is None else got.float().numpy(), scaled


def test_the_shards_together_are_the_whole_head() -> None:
    [(wanted, _)] = on_ranks(logits, size=1)
    (got, first), (none, second) = on_ranks(logits)
    assert got.shape == (5, VOCABULARY)
    assert first == [5] and second == [7, 9] and abs(got - wanted).max() < 0.02 * abs(wanted).max()
    assert none is None or (none == got).all()
