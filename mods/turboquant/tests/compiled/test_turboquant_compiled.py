"""Each variant that ships, compiled by NVRTC for its architecture: what it needs."""

from __future__ import annotations

import pytest
from sparkpin_modkit import ModError
from sparkpin_modkit.testing import SHARED_MEMORY, resources_of
from sparkpin_turboquant import kernel
from sparkpin_turboquant.formats import FORMATS
from sparkpin_turboquant.tuned import splits_of, tuned_for, variant_for


@pytest.mark.parametrize(
    ("name", "head_dim", "rows"),
    [
        *((name, 256, rows) for name in FORMATS for rows in (16, 64)),
        ("turboquant_4bit_nc", 256, 32),
        ("turboquant_4bit_nc", 256, 48),
        ("turboquant_4bit_nc", 128, 64),
        ("turboquant_3bit_nc", 64, 64),
    ],
)
def test_nothing_spills_and_all_fits(architecture: int, name: str, head_dim: int, rows: int) -> None:
    variant = variant_for(tuned_for(architecture), FORMATS[name], head_dim, rows)
    cubin = kernel.compile_cubin(variant, architecture)
    for function in variant.functions:
        used = resources_of(cubin, function)
        assert used["STACK"] == used["LOCAL"] == 0 and 0 < used["REG"] <= 255
    assert (
        max(variant.functions.values()) + 1024 <= SHARED_MEMORY[architecture]
    )  # a kibibyte of each block is the driver's


@pytest.mark.parametrize(("name", "head_dim"), [*((name, 256) for name in FORMATS), ("turboquant_3bit_nc", 64)])
def test_the_rest_leaves_room_for_many_warps(architecture: int, name: str, head_dim: int) -> None:
    access = kernel.Access(head_dim, FORMATS[name].key_bits, FORMATS[name].value_bits)
    cubin = kernel.compile_cubin(access, architecture)
    for function in access.functions:
        used = resources_of(cubin, function)
        assert used["STACK"] == used["LOCAL"] == 0 and 0 < used["REG"] <= 48


def test_what_does_not_compile_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)for -arch=sm_90a: .*error"):
        kernel.compile_cubin(kernel.Variant(255, 4, 4, 1, 8, 1), 90)


def test_other_architectures_take_what_fits_the_smallest() -> None:
    assert tuned_for(120) == tuned_for(121)
    assert not any(entry.overlap for entry in tuned_for(89))
    with pytest.raises(ModError, match=r"capability 7\.5 is too old, wanted 8\.0"):
        tuned_for(75)


def test_many_rows_are_split_by_heads() -> None:
    assert [splits_of(queries, 16) for queries in range(1, 9)] == [1, 1, 1, 1, 2, 2, 2, 2]
    assert [splits_of(8, group) for group in (1, 6, 7, 9, 12, 32)] == [1, 1, 1, 3, 2, 4]
    with pytest.raises(ValueError, match="65 query tokens"):
        splits_of(65, 4)
