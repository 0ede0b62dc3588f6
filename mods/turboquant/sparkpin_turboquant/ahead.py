"""Compile the attention kernel for a GPU that need not be there; see int8-lm-head's module of this name."""

from __future__ import annotations

from typing import Any

from triton import language as tl
from triton.runtime.jit import MockTensor

from sparkpin_turboquant.attend import attend
from sparkpin_turboquant.formats import Format
from sparkpin_turboquant.tuned import Tuned, columns


def compile_one(tuned: Tuned, format: Format, group: int, queries: int, block_size: int, head_dim: int = 256) -> Any:
    """The kernel for up to `queries` tokens of `group` heads on a model with two KV heads; Triton's compiled kernel."""
    half, word, count = MockTensor(tl.float16), MockTensor(tl.float32), MockTensor(tl.int32)
    m0, m1 = columns(queries * group)
    return attend.warmup(
        half,
        word,
        half,
        MockTensor(tl.uint8),
        count,
        count,
        count,
        None,
        1.0,
        2,
        256,
        tuned.share,
        16 * 1024,
        3,
        HEADS=2,
        GROUP=group,
        ROWS=queries * group,
        M0=m0,
        M1=m1,
        D=head_dim,
        KEY_BITS=format.key_bits,
        VALUE_BITS=format.value_bits,
        BLOCK=block_size,
        SLOT=format.slot_bytes(head_dim),
        N=tuned.tokens,
        MOST=16,
        STAGES=tuned.stages,
        OWNERS=False,
        PAIRS=tuned.pairs,
        OVERLAP=tuned.overlap,
        ASSEMBLY=True,
        num_warps=tuned.warps,
        num_stages=tuned.stages,
        maxnreg=tuned.registers,
        launch_pdl=tuned.overlap,
        grid=(1,),
    )
