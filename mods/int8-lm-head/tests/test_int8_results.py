"""The README's tables are those of benchmarks/h200.json."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

MOD = Path(__file__).parents[1]
README = (MOD / "README.md").read_text(encoding="utf-8")
# By path: another mod's benchmarks may have such a name, too.
spec = importlib.util.spec_from_file_location("int8_lm_head_tables", MOD / "benchmarks/tables.py")
assert spec and spec.loader
tables = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tables)
MADE = tables.tables(json.loads((MOD / "benchmarks/h200.json").read_text(encoding="utf-8")))


@pytest.mark.parametrize("made", MADE, ids=["4 bits", "times", "float32", "spark", "processors"])
def test_a_table_of_the_readme_is_the_results(made: str) -> None:
    assert made in (README if "|" in made else " ".join(README.split()))
