"""The faults of modkit/tests/mutations.py that the kernels' own tests catch in Triton's interpreter."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "modkit/tests"))

from mutations import MUTATIONS, caught_by, survives


@pytest.mark.parametrize("name", caught_by("int8-lm-head/tests/interpreted/"))
def test_a_mutation_is_caught(name: str, tmp_path: Path) -> None:
    assert survives(name, tmp_path) == ""


def test_a_change_that_is_no_fault_survives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = MUTATIONS["low digit dropped"]
    monkeypatch.setitem(MUTATIONS, "none", whole._replace(after=whole.before))
    assert "1 passed" in survives("none", tmp_path)
