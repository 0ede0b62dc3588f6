"""A head in shards, in two real processes: what vLLM gathers from both, against the whole head in one.

Needs the project's `src` on PYTHONPATH, for the builder.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sparkpin_int8_lm_head
import torch
from sparkpin_int8_lm_head import stored
from sparkpin_modkit.testing import on_ranks, vllm_rank
from test_int8_stored import Model, built, weights
from vllm.model_executor.layers.logits_processor import LogitsProcessor

VOCABULARY, WIDTH = 500, 100


def head_weight() -> torch.Tensor:
    """Columns that are far out in one half of the vocabulary alone, so that halves and whole differ in their scales."""
    weight = weights(VOCABULARY, WIDTH, torch.bfloat16, 0.3)
    weight[:256, 5] *= 30
    weight[256:, [7, 9]] *= 30
    return weight


def logits(rank: int, size: int, meeting: str, form: str) -> Any:
    """Gathered on rank 0, None elsewhere; which columns are scaled here."""
    sparkpin_int8_lm_head.register()
    with vllm_rank(rank, size, meeting) as config:
        hf_config = SimpleNamespace(**({stored.SETTING: {"format": 1}} if form == "stored" else {}))
        config.model_config = SimpleNamespace(hf_config=hf_config, head_dtype=None)
        folder = Path(meeting).parent / f"head-{rank}"
        folder.mkdir()
        head = Model(VOCABULARY, WIDTH).load(
            built(head_weight(), folder) if form == "stored" else {"weight": head_weight()}
        )
        x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
        got = LogitsProcessor(VOCABULARY)(head, x)
        scaled = (head.weight_column_scale != 1).nonzero().flatten().tolist()
        return got if got is None else got.float().numpy(), scaled


@pytest.mark.parametrize("form", ["stored", "made at load"])
def test_the_shards_together_are_the_whole_head(form: str) -> None:
    [(wanted, whole)] = on_ranks(logits, form, size=1)
    (got, first), (none, second) = on_ranks(logits, form)
    assert got.shape == (5, VOCABULARY)
    if form == "stored":  # scales of the whole head, wherever a row lies
        assert (got == wanted).all() and first == second == whole and whole
    else:
        assert first != second and abs(got - wanted).max() < 0.02 * abs(wanted).max()
    assert none is None or (none == got).all()
