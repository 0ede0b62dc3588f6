"""Prefix caching of models with linear attention on a CPU without Triton, as long as nothing is drafted.

vLLM 0.32.0 copies their states from block to block with a Triton kernel (``batch_memcpy``), which the CPU platform has
no stand-in for (vllm/utils/cpu_triton_utils.py): the server starts and ends at the first request. With a drafter it
copies with two more kernels, which are not replaced. May go with the first vLLM in which
``test_vllm_still_needs_a_copy_without_triton`` fails.
"""

from __future__ import annotations

import ctypes

import torch
from sparkpin_modkit import check_signature


def install() -> None:
    from vllm.v1.worker import mamba_utils

    check_signature(mamba_utils.batch_memcpy, "src_ptrs, dst_ptrs, sizes")
    mamba_utils.batch_memcpy = batch_memcpy


def batch_memcpy(src_ptrs: torch.Tensor, dst_ptrs: torch.Tensor, sizes: torch.Tensor) -> None:
    """Copy ``sizes[i]`` bytes from address ``src_ptrs[i]`` to ``dst_ptrs[i]``, one by one; the two may overlap.

    Args:
        src_ptrs, dst_ptrs, sizes: ``[copies]``, integers, on the CPU.
    """
    for source, target, size in zip(src_ptrs.tolist(), dst_ptrs.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)
