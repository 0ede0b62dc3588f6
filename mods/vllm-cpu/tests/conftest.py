"""What this mod's tests share."""

from __future__ import annotations

import pytest
from sparkpin_vllm_cpu.linear import ExpandedInt4LinearKernel
from vllm.model_executor.kernels import linear
from vllm.platforms import PlatformEnum
from vllm_cpu_replaced import REPLACED, STOCK


@pytest.fixture(autouse=True)
def stock(monkeypatch: pytest.MonkeyPatch, unregistered: None) -> None:
    """vLLM without the mod, put back after the test."""
    for owner, name in REPLACED:
        monkeypatch.setattr(owner, name, STOCK[name])
    offered = linear._POSSIBLE_KERNELS[PlatformEnum.CPU]
    others = [kernel for kernel in offered if kernel is not ExpandedInt4LinearKernel]
    monkeypatch.setitem(linear._POSSIBLE_KERNELS, PlatformEnum.CPU, others)
