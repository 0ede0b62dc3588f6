"""Each variant that ships, compiled by NVRTC for its architecture: what it needs."""

from __future__ import annotations

import pytest
from sparkpin_modkit import ModError
from sparkpin_modkit.testing import resident_blocks, resources_of
from sparkpin_turboquant import ahead, kernel
from sparkpin_turboquant.formats import HEAD_DIMS
from sparkpin_turboquant.tuned import programs_of, splits_of, tuned_for

PROCESSORS = {90: 132, 121: 48}
HEAD_SIZES = {90: (256,), 121: HEAD_DIMS}  # 121 is what images are built for


def test_all_that_ships_fits_its_gpu(architecture: int) -> None:
    """Nothing spills; as many blocks as are launched are at work at a time. Where tuned.json has another GPU's entries
    (121 has 90's), this is what was checked of them."""
    for compiled in ahead.warm_up(head_dims=HEAD_SIZES[architecture]):
        cubin = kernel.cubin_of(compiled, architecture)
        used = {function: resources_of(cubin, function) for function in compiled.functions}
        for function, of in used.items():
            assert of["STACK"] == of["LOCAL"] == 0 < of["REG"] <= 255, (compiled, function)
        if isinstance(compiled, kernel.Access):
            assert all(of["REG"] <= 48 for of in used.values()), compiled  # room for many warps
            continue
        for sequences, heads in ((1, 1), (1, 2), (1, 8), (16, 2)):
            programs = programs_of(compiled, PROCESSORS[architecture], heads)
            args = kernel.Args(programs=programs, sequences=sequences, rows=16 * compiled.rows)
            for launch in compiled.launches(args, heads):
                room = launch.threads, launch.shared_bytes
                resident = resident_blocks(architecture, used[launch.function]["REG"], *room)
                blocks = programs * heads if launch.function == "attend" else 1
                assert 0 < blocks <= resident * PROCESSORS[architecture], (compiled, launch)


def test_what_does_not_compile_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)for -arch=sm_90a: .*error"):
        kernel.compile_cubin(kernel.Variant(255, 4, 1, 8, 1), 90)


def test_other_architectures_take_what_fits_the_smallest() -> None:
    assert tuned_for(120) == tuned_for(121)
    assert not tuned_for(89).overlap
    with pytest.raises(ModError, match=r"capability 7\.5 is too old, expected 8\.0"):
        tuned_for(75)


def test_many_rows_are_split_by_heads() -> None:
    assert [splits_of(queries, 16) for queries in range(1, 9)] == [1, 1, 1, 1, 2, 2, 2, 2]
    assert [splits_of(8, group) for group in (1, 6, 7, 9, 12, 32)] == [1, 1, 1, 3, 2, 4]
    with pytest.raises(ValueError, match="65 query tokens"):
        splits_of(65, 4)
