"""The kernel through Triton's compiler, for GPUs that are not there. Like tests/interpreted for a process of its own:

TRITON_INTERPRET=0 python -m pytest mods/turboquant/tests/compiled
"""

from __future__ import annotations

import os

import pytest

if os.environ.get("TRITON_INTERPRET") != "0":
    collect_ignore_glob = ["test_*.py"]


class NoGpu:
    """Stands for a driver: all that compiling asks of one."""

    def __init__(self, architecture: int) -> None:
        self.architecture = architecture

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self) -> int:
        return self.architecture  # compiled kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture(params=[90, 121], ids=["sm_90", "sm_121"])
def architecture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path):
    """Compile for this one, with an empty cache. Not set back: there is no GPU whose driver could be."""
    from triton.runtime import driver

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    driver.set_active(NoGpu(request.param))
    return request.param
