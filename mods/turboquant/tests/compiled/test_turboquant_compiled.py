"""Each configuration that ships, compiled for its architecture: what it needs of a multiprocessor."""

from __future__ import annotations

import pytest
from sparkpin_modkit import ModError
from sparkpin_modkit.testing import SHARED_MEMORY, resources_of
from sparkpin_turboquant.ahead import compile_one
from sparkpin_turboquant.formats import FORMATS
from sparkpin_turboquant.tuned import columns, entry_for, tuned_for

SPILLED = {(90, 2): 416, (90, 3): 1120, (90, 4): 1024, (121, 2): 256, (121, 3): 256, (121, 4): 256}
"""Bytes of stack for each thread that are known and no more: with 16 heads from two tokens on. See the README."""


@pytest.mark.parametrize("queries", [1, 2, 3, 4])
def test_the_main_format_fits(architecture: int, queries: int) -> None:
    compiled = compile_one(
        entry_for(queries * 16, tuned_for(architecture)), FORMATS["turboquant_4bit_nc"], 16, queries, 4608
    )
    used = resources_of(compiled.asm["cubin"])
    assert used["STACK"] <= SPILLED.get((architecture, queries), 0) and 0 < used["REG"] <= 255
    assert compiled.metadata.shared <= SHARED_MEMORY[architecture]
    assert "mma" in compiled.asm["ptx"]


@pytest.mark.parametrize("name", ["turboquant_k8v4", "turboquant_k3v4_nc", "turboquant_3bit_nc"])
def test_the_other_formats_fit(architecture: int, name: str) -> None:
    compiled = compile_one(tuned_for(architecture)[0], FORMATS[name], 16, 1, 4608)
    assert compiled.metadata.shared <= SHARED_MEMORY[architecture]


def test_other_architectures_take_what_fits_the_smallest() -> None:
    assert tuned_for(120) == tuned_for(121) != tuned_for(90)
    assert not any(entry.overlap for entry in tuned_for(89))
    with pytest.raises(ModError, match=r"capability 7\.5 is too old, wanted 8\.0"):
        tuned_for(75)


def test_columns_are_the_rows_or_a_little_more() -> None:
    assert [columns(rows) for rows in (1, 16, 17, 32, 48, 64, 80, 96, 128)] == [
        (16, 0),
        (16, 0),
        (32, 0),
        (32, 0),
        (32, 16),
        (64, 0),
        (64, 16),
        (64, 32),
        (64, 64),
    ]
