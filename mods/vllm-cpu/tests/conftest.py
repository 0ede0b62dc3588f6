"""What this mod's tests share."""

from __future__ import annotations

import pytest


@pytest.fixture
def own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's choice of linear kernels without the mod's, put back after the test."""
    from sparkpin_vllm_cpu.linear import ExpandedInt4LinearKernel
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel
    from vllm.platforms import PlatformEnum

    current = CPUWNA16LinearKernel.can_implement
    monkeypatch.setattr(CPUWNA16LinearKernel, "can_implement", getattr(current, "__wrapped__", current))
    offered = [
        kernel for kernel in linear._POSSIBLE_KERNELS[PlatformEnum.CPU] if kernel is not ExpandedInt4LinearKernel
    ]
    monkeypatch.setitem(linear._POSSIBLE_KERNELS, PlatformEnum.CPU, offered)
