"""The copies that prefix caching makes of linear attention's states."""

from __future__ import annotations

import pytest
import torch
from sparkpin_vllm_cpu.prefix import batch_memcpy


def pointers(*tensors: torch.Tensor) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors])


def test_each_is_copied_to_its_place_and_an_overlap_is_moved() -> None:
    a, b = torch.arange(100, dtype=torch.float32), torch.zeros(100)
    c = torch.arange(16, dtype=torch.int16)
    sizes = torch.tensor([40, 24], dtype=torch.int32)
    batch_memcpy(pointers(a[5:], c[4:]), pointers(b, c), sizes)
    assert torch.equal(b[:10], a[5:15]) and not b[10:].any()
    assert c.tolist() == [*range(4, 16), 12, 13, 14, 15]


def test_vllm_still_needs_a_copy_without_triton() -> None:
    """Without Triton a kernel is a name that cannot be launched, unless the CPU worker puts a stand-in there."""
    from vllm.utils import cpu_triton_utils
    from vllm.v1.worker import mamba_utils

    assert not hasattr(cpu_triton_utils, "batch_memcpy_kernel")
    with pytest.raises(TypeError):
        mamba_utils.batch_memcpy_kernel[(1,)](*[torch.zeros(1, dtype=torch.int64)] * 3, BLOCK_SIZE=1024)
