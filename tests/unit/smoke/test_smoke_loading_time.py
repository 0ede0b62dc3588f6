"""What loading the weights takes."""

from __future__ import annotations

import json

import pytest
from doc_tables import table
from places import PROJECT


@pytest.mark.parametrize(
    ("file", "head"),
    [("2026-11-27-h200.json", "loader | weights, s"), ("2026-11-28-h200-warm.json", "loader, warm | weights, s")],
)
def test_the_tables_of_the_docs_are_what_was_kept(file: str, head: str) -> None:
    kept = json.loads((PROJECT / "benchmarks/loaders/data" / file).read_text())
    rows = [[float(cell.strip("*")) for cell in cells] for _, *cells in table("benchmarks/notes/memory.md", head)]
    wanted = []
    for start in kept["starts"]:
        weights, first = start["weights_s"], start["first_token_s"]
        wanted.append([round(weights, 1), round(kept["bytes"] / weights / 1e9, 1), first, round(first - weights)])
    assert rows == wanted
