"""Each fault that was written down is caught by the test that is named for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from mutations import MODS, MUTATIONS, caught_by, survives


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_of_code_and_its_test_is_there(name: str) -> None:
    one = MUTATIONS[name]
    assert (MODS / one.source).read_text().count(one.before) == 1
    file, _, test = one.test.partition("::")
    assert f"def {test}(" in (MODS / file).read_text() if one.test else one.only_gpu
    assert not any(word in file for word in ("documents", "results"))


@pytest.mark.parametrize("name", caught_by("hybrid-int4-fp8/") + caught_by("modkit/"))
def test_a_mutation_is_caught(name: str, tmp_path: Path) -> None:
    assert survives(name, tmp_path) == ""
