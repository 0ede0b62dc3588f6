"""The CUDA backend for vLLM since 0.32."""

from __future__ import annotations

from sparkpin_turboquant.gpu import GpuBackend
from sparkpin_turboquant.layouts import LayoutBackend


class TurboQuantBackend(LayoutBackend, GpuBackend):
    pass
