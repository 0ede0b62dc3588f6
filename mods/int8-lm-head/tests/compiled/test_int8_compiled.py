"""Every configuration that ships, compiled for its architecture: what it needs of a multiprocessor, and no spills."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from sparkpin_int8_lm_head.ahead import DTYPES, compile_digits, compile_head, compile_int4, warm_up
from sparkpin_int8_lm_head.kernel import input_digits, int4_head, int8_head
from sparkpin_int8_lm_head.layout import READ_AHEAD
from sparkpin_int8_lm_head.tuned import tuned_for
from sparkpin_modkit import ModError
from sparkpin_modkit.testing import SHARED_MEMORY, resources_of

FUNCTIONS = (int8_head, input_digits, int4_head)


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_spills_and_enough_shared_memory(architecture: int, dtype: torch.dtype, has_bias: bool) -> None:
    for entry in tuned_for(architecture).values():
        check(architecture, compile_head(entry, dtype, has_bias))


def check(architecture: int, compiled: Any) -> None:
    used = resources_of(compiled.asm["cubin"])
    assert used["STACK"] == used["LOCAL"] == 0 and 0 < used["REG"] <= 255
    assert compiled.metadata.shared <= SHARED_MEMORY[architecture]
    instruction = r"wgmma\.mma_async\S*\.s32\.s8\.s8" if architecture == 90 else r"mma\.sync\S*\.s32\.s8\.s8\.s32"
    assert re.search(instruction, compiled.asm["ptx"])


def test_rows_of_4_bits_are_unpacked_four_bytes_at_a_time(architecture: int) -> None:
    """In registers, between shared memory and the matrix units: two instructions for the lower halves of four bytes,
    one for the upper ones. Byte by byte they are seven times as many, with the bytes' own permutations."""
    for entry in tuned_for(architecture, bits=4).values():
        compiled = compile_int4(entry)
        check(architecture, compiled)
        words = entry.block_v * entry.block_k // 4 // (32 * entry.warps)
        ptx = compiled.asm["ptx"]
        # sm_121's warps each hold what their products need, which others hold, too
        held = ptx.count("0xf0f0f0f0") // 2
        assert held % words == 0 and held // words in (1, 2, 4), entry
        assert ptx.count("prmt") < words


@pytest.mark.parametrize("has_column_scale", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_digits_compile_without_spills(architecture: int, dtype: torch.dtype, has_column_scale: bool) -> None:
    used = resources_of(compile_digits(dtype, has_column_scale).asm["cubin"])
    assert used["STACK"] == used["LOCAL"] == 0


def test_warm_up_compiles_each_variant_once(architecture: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for function in FUNCTIONS:
        function.device_caches.clear()  # of other tests, whose cache on disk was another
    first = warm_up()
    in_4_bits = len(tuned_for(architecture, bits=4))
    assert len(first) == len(DTYPES) * (3 + len(tuned_for(architecture))) + in_4_bits
    assert len({kernel.hash for kernel in first}) == len(first)
    # From here on the compiler would fail: what is asked for again comes from Triton's cache on disk.
    for function in FUNCTIONS:
        function.device_caches.clear()
    monkeypatch.setattr("triton.backends.nvidia.compiler.CUDABackend.make_cubin", None)
    assert [kernel.hash for kernel in warm_up()] == [kernel.hash for kernel in first]


def test_without_float32_each_tile_writes_logits_of_the_activations_type(architecture: int, monkeypatch) -> None:
    """What is asked of the compiler; tests/on_gpu compile it."""
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr("sparkpin_int8_lm_head.ahead.compile_digits", lambda *_: None)
    monkeypatch.setattr("sparkpin_int8_lm_head.ahead.compile_head", lambda *what: asked.append(what))
    warm_up(DTYPES[:1], float32=False)
    assert asked == [(entry, DTYPES[0], False, DTYPES[0]) for entry in tuned_for(architecture).values()]


def test_block_k_stays_within_what_lies_behind_the_last_row(architecture: int) -> None:
    for bits in (8, 4):
        tuned = tuned_for(architecture, bits)
        assert list(tuned) == [8, 16, 32, 64] and all(entry.block_k <= READ_AHEAD for entry in tuned.values())


def test_other_architectures_take_what_fits_the_smallest() -> None:
    assert tuned_for(80) == tuned_for(89) == tuned_for(100) == tuned_for(120) == tuned_for(121) != tuned_for(90)
    with pytest.raises(ModError, match=r"capability 7\.5 is too old, expected 8\.0"):
        tuned_for(75)
