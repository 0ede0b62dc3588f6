"""Where vLLM looks at a model's class."""

from __future__ import annotations

import os

import sparkpin_vllm_cpu
from vllm.model_executor.models import registry


def looked_at() -> int:
    """The process in which it looks, where nothing is in its cache."""
    return registry._run_in_subprocess(os.getpid)


def test_vllm_still_inspects_in_a_process_of_its_own() -> None:
    """When this fails, the override may go."""
    assert looked_at() != os.getpid()


def test_the_mod_has_it_look_here() -> None:
    sparkpin_vllm_cpu.register()
    assert looked_at() == os.getpid()
    model = registry.ModelRegistry.models["Qwen3_5MoeForCausalLM"]
    assert model.inspect_model_cls() == registry._ModelInfo.from_model_cls(model.load_model_cls())
