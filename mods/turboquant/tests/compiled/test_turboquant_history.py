"""The kernels that read a history for prefill, compiled: what they need of a multiprocessor."""

from __future__ import annotations

from typing import Any

import pytest
from sparkpin_modkit.testing import SHARED_MEMORY, resources_of
from sparkpin_turboquant import history
from sparkpin_turboquant.formats import FORMATS
from triton import language as tl
from triton.runtime.jit import MockTensor

HALF, BYTES, COUNT, WORD = (MockTensor(kind) for kind in (tl.bfloat16, tl.uint8, tl.int32, tl.float32))


def check(compiled: Any, architecture: int) -> None:
    used = resources_of(compiled.asm["cubin"])
    assert used["STACK"] <= 32 and 0 < used["REG"] <= 255  # one of them spills eight numbers
    assert compiled.metadata.shared <= SHARED_MEMORY[architecture]


@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_expand(architecture: int, name: str, head_dim: int) -> None:
    format = FORMATS[name]
    sizes = {"KEY_BITS": format.key_bits, "VALUE_BITS": format.value_bits, "BLOCK": 4608}
    compiled = history.expand.warmup(
        HALF,
        BYTES,
        COUNT,
        0,
        100,
        0,
        16 * 1024,
        HEADS=2,
        D=head_dim,
        SLOT=format.slot_bytes(head_dim),
        NORM=head_dim**-0.5,
        T=history.TOKENS,
        num_warps=4,
        grid=(1,),
        **sizes,
    )
    check(compiled, architecture)


def test_fold(architecture: int) -> None:
    compiled = history.fold.warmup(HALF, WORD, HALF, WORD, 8192, 7, 8192, 7, D=256, num_warps=1, grid=(1,))
    check(compiled, architecture)
