"""benchmarks/nodes: what of it needs no GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from checkout import PROJECT
from doc_tables import table

sys.path += [str(PROJECT / "benchmarks/nodes"), str(PROJECT / "benchmarks/stage_table")]

import pair

import stages
from sparkpin.pins.nodes import NODES, TENSOR, on_loopback, words_at


def test_the_table_of_the_readme_is_what_was_kept() -> None:
    kept = PROJECT / "benchmarks/nodes/data/2026-11-28-two-h200"
    _, *wanted = pair.rows({job: json.loads((kept / f"{job}.json").read_text()) for job in (pair.NVLINK, pair.SOCKETS)})
    shown = table("benchmarks/nodes/README.md", "context:users | nvlink | sockets")
    assert [tuple(cells[:4]) for cells in shown] == [cells[:4] for cells in wanted]


def test_ranks_differ_where_they_must() -> None:
    first, second = (pair.more_arguments(pair.NVLINK, rank) for rank in (0, 1))
    assert {key for key in first if first[key] != second[key]} == {"node_rank"}
    alone = pair.more_arguments(pair.ONE, 0)
    assert set(first) & set(stages.arguments(stages.STAGES["v2"])) == set(alone)
    # The words that `invoke serve` adds on one host, as arguments.
    words = [word for word in words_at([NODES, "2", TENSOR, "2"], on_loopback(1)) if word.startswith("--")]
    named = {word.removeprefix("--").replace("-", "_") for word in words} - {"headless"}
    assert named == set(second) - set(alone) - {"distributed_executor_backend"}
    assert "NCCL_P2P_DISABLE" in pair.environment("sockets+25", 1, Path("/o"))
    assert "NCCL_P2P_DISABLE" not in pair.environment(pair.NVLINK, 1, Path("/o"))
