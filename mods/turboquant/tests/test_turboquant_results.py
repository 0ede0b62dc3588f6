"""The README's numbers are those of benchmarks/h200.json; what report.py makes of results."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from sparkpin_turboquant.tuned import tuned_for

MOD = Path(__file__).parents[1]
README = (MOD / "README.md").read_text(encoding="utf-8").splitlines()
ROWS = json.loads((MOD / "benchmarks/h200.json").read_text(encoding="utf-8"))


# By path: other mods' benchmarks have such names, too.
spec = importlib.util.spec_from_file_location("turboquant_report", MOD / "benchmarks/report.py")
report = importlib.util.module_from_spec(spec)
spec.loader.exec_module(report)


def test_the_readme_s_speeds_are_the_results() -> None:
    lines = report.speeds(ROWS).splitlines()[2:]
    assert len(lines) == 12 and set(lines) <= set(README)


def test_the_readme_s_prefill_is_the_results() -> None:
    """By the way that tuned.json, which these results made, chooses."""
    lines = report.prefill(ROWS).splitlines()
    assert len(lines) == 2 + 9 and "\n".join(lines) in "\n".join(README)
    tuned = tuned_for(90)
    assert report.tuned() == (tuned.few, tuned.joined)


def test_the_readme_s_way_is_not_always_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [sized(8192, 8, few_us=50, room_16384_us=40, joined_us=30), sized(8192, 64, few_us=50, room_16384_us=40)]
    monkeypatch.setattr(report, "tuned", lambda: (8, 32))
    assert report.prefill(rows).splitlines()[2:] == ["| 8 | 50 / 100 / 90 | 2.00 |", "| 64 | 40 / 100 / 90 | 2.50 |"]
    monkeypatch.setattr(report, "tuned", lambda: (4, 64))
    assert report.prefill(rows).splitlines()[2:] == ["| 8 | 30 / 100 / 90 | 3.33 |", "| 64 |  |  |"]


def test_other_numbers_of_the_readme() -> None:
    text, others = " ".join(README), report.others(ROWS).splitlines()
    assert "892, 674, 548 GB/s" in text and "with few multiprocessors 892, 674, 548 GB/s" in others
    for name, short in (("k8v4", "k8v4"), ("4bit_nc", "4bit")):
        [line] = [line for line in others if line.startswith(f"turboquant_{name} ")]
        assert f"{short} {line.partition(' ')[2]}" in text


def test_tuned_is_what_the_results_advise() -> None:
    tuned = tuned_for(90)
    assert report.advice(ROWS).startswith(f'for tuned.json: "few": {tuned.few}, "joined": {tuned.joined}: ')


def sized(history: int, new: int, **times: float) -> dict[str, Any]:
    return {"history": history, "new": new, "paged_us": 100.0, "bf16_us": 90.0, **times}


def test_advice_is_what_takes_the_least() -> None:
    rows = [
        sized(8192, 16, few_us=110, room_16384_us=180, joined_us=120),
        sized(8192, 64, few_us=300, room_16384_us=150, joined_us=125),
        sized(8192, 512, room_16384_us=100, joined_us=101, room_4096_us=7),
    ]
    assert report.advice(rows).startswith('for tuned.json: "few": 16, "joined": 64: ')
    for row in rows:
        row.pop("joined_us")
    assert '"joined": 0' in report.advice(rows)
    assert report.advice([]) == "no prefill was measured"
