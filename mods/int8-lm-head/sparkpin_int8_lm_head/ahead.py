"""Compile every variant of the kernels that decoding can meet, before a request does. Needs no GPU.

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

from sparkpin_int8_lm_head.kernel import INPUT_BLOCK, INPUT_WARPS, input_digits, int4_head, int8_head
from sparkpin_int8_lm_head.tuned import Tuned, tuned_for

DTYPES = (tl.bfloat16, tl.float16)
"""Triton's names or torch's, which come to the same kernels: a build has no use for torch."""


def warm_up(
    dtypes: Iterable[Any] = DTYPES,
    column_scales: Sequence[bool] = (False, True),
    biases: Sequence[bool] = (False,),
    *,
    float32: bool = True,
) -> list[Any]:
    """Compile for the current target of Triton's driver: each type of activation, each thing that a head may have.

    Variants differ in nothing else: the number of tokens is not specialised, vLLM makes V a multiple of 64, and K is
    one of 16. With another V or K, or a bias, one more is compiled when `cuda.rehearse` tries the head. The largest
    tile is compiled for logits of the activations' type, too, which only prompt_logprobs of many tokens want; without
    `float32` each tile is compiled for them alone, and none for rows of 4 bits, whose drafts are never sampled.

    Returns:
        Triton's compiled kernels.
    """
    architecture = driver.active.get_current_target().arch
    tuned = tuned_for(architecture)
    compiled = [compile_int4(entry) for entry in tuned_for(architecture, bits=4).values()] if float32 else []
    for dtype in dtypes:
        compiled += [compile_digits(dtype, has_column_scale) for has_column_scale in column_scales]
        for has_bias in biases:
            if float32:
                compiled += [compile_head(entry, dtype, has_bias) for entry in tuned.values()]
            entries = [tuned[max(tuned)]] if float32 else tuned.values()
            compiled += [compile_head(entry, dtype, has_bias, dtype) for entry in entries]
    return compiled


def compile_digits(dtype: Any, has_column_scale: bool) -> Any:
    """One variant of `input_digits`, from Triton's cache if it is there."""
    return input_digits.warmup(
        MockTensor(tl.int8),
        MockTensor(tl.float32),
        MockTensor(dtype),
        MockTensor(dtype) if has_column_scale else None,
        256,
        256,
        HAS_COLUMN_SCALE=has_column_scale,
        BLOCK=INPUT_BLOCK,
        num_warps=INPUT_WARPS,
        grid=(1,),
    )


def compile_head(tuned: Tuned, dtype: Any, has_bias: bool, logits: Any = tl.float32) -> Any:
    """One variant of `int8_head`, from Triton's cache if it is there. dtype: of scales and bias."""
    return int8_head.warmup(
        MockTensor(logits),
        MockTensor(tl.int8),
        MockTensor(tl.float32),
        MockTensor(tl.int8),
        MockTensor(dtype),
        MockTensor(dtype) if has_bias else None,
        2,
        256,
        256,
        HAS_BIAS=has_bias,
        grid=(1,),
        **tuned.options,
    )


def compile_int4(tuned: Tuned) -> Any:
    """The variant of `int4_head` that `tuned` means, whatever type the activations have."""
    return int4_head.warmup(
        MockTensor(tl.float32),
        MockTensor(tl.int8),
        MockTensor(tl.float32),
        MockTensor(tl.int8),
        MockTensor(tl.float32),
        2,
        256,
        256,
        IN_WORDS=True,
        grid=(1,),
        **tuned.options,
    )
