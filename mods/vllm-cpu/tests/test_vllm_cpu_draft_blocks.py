"""The block table that a second model gets which drafts for a model with linear attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sparkpin_vllm_cpu import draft_blocks
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm_cpu_replaced import STOCK

STATES, KEYS = 0, 1  # groups of cache layers


class Table:
    """What the override reads of a block table: room for four requests of two blocks each, from block `first` on."""

    def __init__(self, first: int) -> None:
        self.blocks = torch.arange(first, first + 8, dtype=torch.int32).reshape(4, 2)
        self.slot_mapping = SimpleNamespace(gpu=torch.arange(16) + 100 * first)

    def get_device_tensor(self, num_reqs: int) -> torch.Tensor:
        return self.blocks[:num_reqs]


def seen(monkeypatch: pytest.MonkeyPatch, proposer: type, group: int) -> tuple[Any, Any, list[Table]]:
    """What vLLM makes of the first group for two requests of five tokens, what the override gives, and the tables."""
    tables = [Table(1), Table(20)]
    starts = torch.tensor([0, 3, 5], dtype=torch.int32)
    made = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor([3, 9], dtype=torch.int32),
        num_reqs=2,
        num_actual_tokens=5,
        max_query_len=3,
        max_seq_len=9,
        block_table_tensor=tables[STATES].get_device_tensor(2),
        slot_mapping=tables[STATES].slot_mapping.gpu[:5],
    )
    # vLLM's own function would take a whole engine; tests/e2e/smoke/test_smoke_drafter.py asks a real one.
    monkeypatch.setattr(GPUModelRunner, "_build_attention_metadata", lambda self, *args, **options: ({}, made))
    monkeypatch.setattr(draft_blocks, "check_signature", lambda fn, expected: None)
    draft_blocks.install()
    runner = SimpleNamespace(input_batch=SimpleNamespace(block_table=tables), drafter=object.__new__(proposer))
    runner.drafter.kv_cache_gid = group
    layers, given = GPUModelRunner._build_attention_metadata(runner, 5, 2, max_query_len=3)
    assert layers == {}
    return made, given, tables


def test_a_draft_model_gets_its_own_group_s_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    made, given, tables = seen(monkeypatch, DraftModelProposer, KEYS)
    assert given.block_table_tensor.tolist() == [[20, 21], [22, 23]]
    assert given.slot_mapping.tolist() == [2000, 2001, 2002, 2003, 2004]
    assert torch.equal(given.seq_lens, made.seq_lens)
    assert torch.equal(made.block_table_tensor, tables[STATES].blocks[:2])  # the states' layers read it later


@pytest.mark.parametrize(("proposer", "group"), [(DraftModelProposer, STATES), (EagleProposer, KEYS)])
def test_what_is_right_is_left(monkeypatch: pytest.MonkeyPatch, proposer: type, group: int) -> None:
    made, given, _ = seen(monkeypatch, proposer, group)
    assert given is made


def test_vllm_still_gives_the_first_group_s_blocks() -> None:
    """When it fails, vLLM looks for a draft model's group, too: look whether this may go."""
    names = STOCK["_build_attention_metadata"].__code__.co_names
    assert "EagleProposer" in names and "DraftModelProposer" not in names
