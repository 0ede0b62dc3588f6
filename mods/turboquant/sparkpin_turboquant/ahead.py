"""Compile every variant of the kernels that decoding can meet, before a request does; see int8-lm-head's module of this
name. Needs no GPU: the one to compile for is the target of Triton's driver, also for what is CUDA C++.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from triton import language as tl
from triton.runtime import driver
from triton.runtime.jit import MockTensor

from sparkpin_turboquant.formats import FORMATS, Format
from sparkpin_turboquant.kernel import Variant, cubin_of
from sparkpin_turboquant.transform import constants, store
from sparkpin_turboquant.tuned import MOST_ROWS, tuned_for, variant_for


def warm_up(
    formats: Iterable[str] = tuple(FORMATS),
    head_dims: Iterable[int] = (256,),
    queries: Iterable[str] = ("bfloat16",),
) -> list[Variant]:
    """Compile for the current target: each format, head size, type of queries, and number of rows of queries.

    What is compiled lies in the folder of Triton's cache: its own kernel in Triton's layout, ours as ``.cubin`` files.
    """
    architecture = driver.active.get_current_target().arch
    tuned = tuned_for(architecture)
    variants = []
    for name in formats:
        for head_dim in head_dims:
            for query in queries:
                compile_store(FORMATS[name], head_dim, getattr(tl, query))
                for rows in range(16, MOST_ROWS + 1, 16):
                    variants.append(variant_for(tuned, FORMATS[name], head_dim, rows, query))
                    cubin_of(variants[-1], architecture)
    return variants


def compile_store(format: Format, head_dim: int, dtype: Any) -> Any:
    """The kernel that stores keys and values of a type; Triton's compiled kernel."""
    new = MockTensor(dtype)
    return store.warmup(
        new,
        new,
        MockTensor(tl.uint8),
        MockTensor(tl.int64),
        MockTensor(tl.float32),
        256,
        256,
        4096,
        16,
        4096,
        A=head_dim // 16,
        KEY_BITS=format.key_bits,
        VALUE_BITS=format.value_bits,
        num_warps=4,
        grid=(1,),
        **constants(head_dim),
    )
