"""docs/quality-ledger.md: its table is what benchmarks/ledger/data has."""

from __future__ import annotations

import json

import pytest
from doc_tables import table
from places import PROJECT

TRAINED, SMOLLM2, CACHES = "2026-11-24-trained", "2026-11-26-smollm2", "2026-11-27-smollm2"
Figure = tuple[str, str, str, str]  # folder, setup, against, figure


def of(figure: str, trained: tuple[str, str], folder: str = "", other: str = "") -> tuple[Figure, Figure | None]:
    return (TRAINED, *trained, figure), (folder, other, "s-bf16", figure) if other else None


ROWS = {
    "another attention kernel: the noise": of("kl", ("triton", "bf16"), SMOLLM2, "s-triton"),
    "shared experts in FP8": of("kl", ("hybrid", "base")),
    "LM head in INT8": of("kl", ("v2", "hybrid"), SMOLLM2, "s-head"),
    "cache with 8-bit keys and 4-bit values": of("continued_kl", ("tq-k8v4", "bf16"), CACHES, "s-tq-k8v4"),
    "**4-bit cache**": of("continued_kl", ("tq-4bit", "bf16"), CACHES, "s-tq-4bit"),
    "3-bit cache (removed)": of("continued_kl", ("tq-3bit", "bf16"), CACHES, "s-tq-3bit"),
}


def measured(folder: str, setup: str, against: str, figure: str) -> float:
    pairs = json.loads((PROJECT / "benchmarks/ledger/data" / folder / "figures.json").read_text())
    (found,) = (one["texts"][0] for one in pairs if (one["name"], one["against"]) == (setup, against))
    assert found["kind"] == "all"
    return float(found[figure]["value"])


def test_the_page_says_what_was_measured() -> None:
    shown = {change: cells for change, _, *cells in table("docs/quality-ledger.md", "change | when")}
    assert shown.keys() == ROWS.keys()
    for change, figures in ROWS.items():
        for cell, figure in zip(shown[change], figures, strict=True):
            if figure:  # to the digits of the page
                assert float(cell) == pytest.approx(measured(*figure), abs=0.51 * 10.0 ** -len(cell.partition(".")[2]))
            else:
                assert cell == "it has none"
