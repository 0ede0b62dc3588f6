"""Compile every variant of the kernel that decoding can meet, before a request does. Needs no GPU.

With a GPU it is a part of loading the model. Without one (an image being built) Triton must have been given a driver
whose target is the GPU of the machine to come, such as ``GPUTarget("cuda", 121, 32)``; what is compiled then goes to
Triton's cache and is found there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from triton import language as tl
from triton.runtime import driver
from triton.runtime.jit import MockTensor

from sparkpin_int8_lm_head.kernel import int8_head
from sparkpin_int8_lm_head.tuned import Tuned, tuned_for

DTYPES = (tl.bfloat16, tl.float16)
"""Triton's names or torch's, which come to the same kernels: a build has no use for torch."""


def warm_up(dtypes: Iterable[Any] = DTYPES, biases: Sequence[bool] = (False,)) -> list[Any]:
    """Compile for the current target of Triton's driver: each dtype, with or without a bias, for each tuned tile.

    Variants differ in nothing else: the number of tokens is not specialised, vLLM makes V a multiple of 64, and K is
    one of 16. With another V or K one more is compiled, when `cuda.prepare` tries the head.

    Returns:
        Triton's compiled kernels.
    """
    tuned = tuned_for(driver.active.get_current_target().arch)
    return [compile_one(entry, dtype, has_bias) for dtype in dtypes for has_bias in biases for entry in tuned.values()]


def compile_one(tuned: Tuned, dtype: Any, has_bias: bool) -> Any:
    """One variant, from Triton's cache if it is there."""
    some = MockTensor(dtype)
    return int8_head.warmup(
        some,
        some,
        MockTensor(tl.int8),
        some,
        some if has_bias else None,
        2,
        256,
        256,
        256,
        BLOCK_B=tuned.block_b,
        BLOCK_V=tuned.block_v,
        BLOCK_K=tuned.block_k,
        HAS_BIAS=has_bias,
        ASSEMBLY=True,
        num_warps=tuned.warps,
        num_stages=tuned.stages,
        grid=(1,),
    )
