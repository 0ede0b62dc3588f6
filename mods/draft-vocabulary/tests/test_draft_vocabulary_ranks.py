"""A head in shards: two real processes draft together what one drafts alone, through vLLM's own reduction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sparkpin_int8_lm_head
from sparkpin_draft_vocabulary import hook
from sparkpin_draft_vocabulary.head import ROWS_MULTIPLE
from sparkpin_modkit.testing import on_ranks, vllm_rank
from test_draft_vocabulary_vllm import CPU, VOCABULARY, Drafter, hidden, settings, whole_head

SPLIT = 256  # vLLM fills 500 tokens up to 512
SETTINGS = {
    "uneven": (40, [260, 499]),
    "even": (30, [*range(300, 330)]),
    "first rank alone": (3, [*range(70, 200)]),
    "all": (VOCABULARY, [499]),
}
"""The lowest ids, and added tokens."""
LISTS = {name: sorted({*range(first), *added}) for name, (first, added) in SETTINGS.items()}


def drafts(rank: int, size: int, meeting: str, kind: str) -> dict[str, Any]:
    """For each list: the drafted tokens, what every rank's rows count, and which rows are kept here."""
    found: dict[str, Any] = {}
    with vllm_rank(rank, size, meeting):
        if kind == "int8":
            sparkpin_int8_lm_head.register()
        for name, (first, added) in SETTINGS.items():
            folder = Path(meeting).parent / f"{name}-{rank}"
            folder.mkdir()
            config = settings(folder, added, {"first": first})
            head, _ = whole_head()
            head.quant_method.process_weights_after_loading(head)
            drafter = Drafter(head)
            hook.restrict(drafter, config, CPU)
            top = drafter.get_top_tokens(hidden(64)).tolist()
            found[name] = top, drafter.draft_id_to_target_id.tolist(), drafter.lm_head.own
    return found


@pytest.fixture(scope="module", params=["bfloat16", "int8"])
def found(request: pytest.FixtureRequest) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
    [alone] = on_ranks(drafts, request.param, size=1)
    return request.param, on_ranks(drafts, request.param), alone


@pytest.mark.parametrize("name", LISTS)
def test_two_ranks_draft_what_one_does(found: Any, name: str) -> None:
    kind, pair, alone = found
    assert pair[0][name][0] == pair[1][name][0]
    assert set(pair[0][name][0]) <= set(LISTS[name])
    same = sum(a == b for a, b in zip(pair[0][name][0], alone[name][0], strict=True))
    # INT8 made at load: each shard chooses its own scales, so a tie may fall otherwise.
    assert same >= (64 if kind == "bfloat16" else 60)


@pytest.mark.parametrize("name", LISTS)
def test_each_rank_keeps_its_own_and_one_table_leads_back(found: Any, name: str) -> None:
    _, pair, _ = found
    low = [token for token in LISTS[name] if token < SPLIT]
    high = [token for token in LISTS[name] if token >= SPLIT]
    assert [one[name][2] for one in pair] == [len(low), len(high)]
    assert pair[0][name][1] == pair[1][name][1]
    wanted = []
    for shard, first in ((low, 0), (high, SPLIT)):
        some = shard or [first]
        wanted += some + some[:1] * (-len(some) % ROWS_MULTIPLE)
    assert [row + offset for row, offset in enumerate(pair[0][name][1])] == wanted


def test_both_sides_win_sometimes(found: Any) -> None:
    _, pair, _ = found
    tops = pair[0]["even"][0]
    assert min(sum(token < SPLIT for token in tops), sum(token >= SPLIT for token in tops)) > 10
