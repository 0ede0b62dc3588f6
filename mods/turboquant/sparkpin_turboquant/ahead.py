"""Compile every kernel that a server may launch, before a request does; see int8-lm-head's module of this name.

Needs no GPU: the one to compile for is the target of Triton's driver, though it is all CUDA C++. What depends on the
model, but for head size and format, is an argument at run time: types, heads, block and slot sizes, strides.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from triton.runtime import driver

from sparkpin_turboquant.formats import FORMATS, HEAD_DIMS
from sparkpin_turboquant.kernel import Access, Compiled, cubin_of
from sparkpin_turboquant.tuned import MOST_ROWS, tuned_for, variant_for


def warm_up(formats: Iterable[str] = tuple(FORMATS), head_dims: Iterable[int] = HEAD_DIMS) -> list[Compiled]:
    """Compile for the current target: each format and head size, and each number of rows of queries.

    What is compiled lies in the folder of Triton's cache as ``.cubin`` files.
    """
    architecture = driver.active.get_current_target().arch
    tuned = tuned_for(architecture)
    all_: list[Compiled] = []
    for format in (FORMATS[name] for name in formats):
        for head_dim in head_dims:
            all_.append(Access(head_dim, format.key_bits))
            all_ += [variant_for(tuned, format, head_dim, rows) for rows in range(16, MOST_ROWS + 1, 16)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # NVRTC works outside of Python's lock
        list(pool.map(lambda compiled: cubin_of(compiled, architecture), all_))
    return all_
