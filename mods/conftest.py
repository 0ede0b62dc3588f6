"""What the mods' tests share. They run where the mods do, in an image: --confcutdir has to name this folder there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from sparkpin_modkit import plugin
from sparkpin_modkit.testing import single_process_vllm


@pytest.fixture(scope="module")
def world() -> Iterator[Any]:
    """vLLM's default configuration, in one process."""
    with single_process_vllm() as config:
        yield config


@pytest.fixture
def unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a fresh process: no mod is registered yet, and none is switched off."""
    monkeypatch.setattr(plugin, "_installed", set())
    for name in os.environ:
        if name.startswith("SPARKPIN_MOD_"):
            monkeypatch.delenv(name)
