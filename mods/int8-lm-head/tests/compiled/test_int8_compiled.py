"""Every configuration that ships, compiled for its architecture: what it needs of a multiprocessor, and no spills."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
import triton
from sparkpin_int8_lm_head.ahead import DTYPES, compile_one, warm_up
from sparkpin_int8_lm_head.kernel import int8_head
from sparkpin_int8_lm_head.layout import READ_AHEAD
from sparkpin_int8_lm_head.tuned import tuned_for
from sparkpin_modkit import ModError

SHARED_MEMORY = {90: 232_448, 121: 101_376}
"""Bytes that one block may ask for: 227 and 99 KiB."""


def resources(cubin: bytes) -> dict[str, int]:
    """REG, STACK, SHARED, LOCAL ... of the one kernel in a cubin."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return {name: int(value) for name, value in re.findall(r"([A-Z]+):(\d+)", done.stdout)}


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_no_spills_and_enough_shared_memory(architecture: int, size: int, dtype: torch.dtype, has_bias: bool) -> None:
    compiled = compile_one(tuned_for(architecture)[size], dtype, has_bias)
    used = resources(compiled.asm["cubin"])
    assert used["STACK"] == used["LOCAL"] == 0 and 0 < used["REG"] <= 255
    assert compiled.metadata.shared <= SHARED_MEMORY[architecture]
    assert "mma" in compiled.asm["ptx"]


def test_warm_up_compiles_each_variant_once(architecture: int, monkeypatch: pytest.MonkeyPatch) -> None:
    int8_head.device_caches.clear()  # of other tests, whose cache on disk was another
    first = warm_up()
    assert len(first) == len(DTYPES) * len(tuned_for(architecture))
    assert len({kernel.hash for kernel in first}) == len(first)
    # From here on the compiler would fail: what is asked for again comes from Triton's cache on disk.
    int8_head.device_caches.clear()
    monkeypatch.setattr("triton.backends.nvidia.compiler.CUDABackend.make_cubin", None)
    assert [kernel.hash for kernel in warm_up()] == [kernel.hash for kernel in first]


def test_block_k_stays_within_what_lies_behind_the_last_row(architecture: int) -> None:
    assert all(entry.block_k <= READ_AHEAD for entry in tuned_for(architecture).values())
    assert all(size == entry.block_b for size, entry in tuned_for(architecture).items())


def test_other_architectures_take_what_fits_the_smallest() -> None:
    assert tuned_for(80) == tuned_for(89) == tuned_for(100) == tuned_for(120) == tuned_for(121) != tuned_for(90)
    with pytest.raises(ModError, match=r"capability 7\.5 is too old, wanted 8\.0"):
        tuned_for(75)
