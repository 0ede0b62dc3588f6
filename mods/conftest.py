"""What the mods' tests share. They run where the mods do, in an image: --confcutdir has to name this folder there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sparkpin_modkit import plugin
from sparkpin_modkit.ahead import AbsentGpu
from sparkpin_modkit.testing import parse_reports, single_process_vllm


@pytest.fixture(scope="module")
def world() -> Iterator[Any]:
    """vLLM's default configuration, in one process."""
    with single_process_vllm() as config:
        yield config


@pytest.fixture(params=[90, 121], ids=["sm_90", "sm_121"])
def architecture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> int:
    """Triton compiles for this GPU, with an empty cache. Not set back: there is no GPU whose driver could be."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    driver.set_active(AbsentGpu(GPUTarget("cuda", request.param, 32)))
    return int(request.param)


@pytest.fixture
def unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a fresh process: no mod is registered yet, and none is switched off."""
    monkeypatch.setattr(plugin, "_installed", set())
    for name in os.environ:
        if name.startswith("SPARKPIN_MOD_"):
            monkeypatch.delenv(name)


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[[], list[dict[str, Any]]]:
    """Reads what the mods have reported since it was read last."""
    monkeypatch.setattr("sparkpin_modkit.reports._vllm_logger", lambda: None)
    return lambda: parse_reports(capfd.readouterr().err)
