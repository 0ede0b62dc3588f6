"""Which kernel a step with drafts gets. Its numbers: tests/on_gpu."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from sparkpin_draft_vocabulary import selfcheck, states
from sparkpin_draft_vocabulary.touches import GDN, ON_CUDA, PORT, STATES, STATES_IN


def test_float16_goes_to_triton_and_all_others_where_they_went() -> None:
    asked: list[tuple[str, dict[str, Any]]] = []

    def kernel(name: str) -> Any:
        return lambda **given: asked.append((name, given))

    impl = states.chosen(lambda: kernel("cuda"), kernel("triton"), torch.float16)
    for kind in (torch.float16, torch.float32, torch.bfloat16):
        impl()(state=torch.empty(0, dtype=kind), scale=0.5)
    assert [name for name, _ in asked] == ["triton", "cuda", "cuda"]
    assert all(given.keys() == {"state", "scale"} for _, given in asked)


def test_the_layers_find_the_choice_where_they_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of the names in 0.33, which the CPU's vLLM has not; tests/on_gpu has the real ones."""
    layer, port, own = ModuleType(GDN), ModuleType(PORT), object()
    layer.__dict__.update(FUSED_GDN_STATE_DTYPES=(torch.float32, torch.bfloat16), fused_mtp_decode_impl=lambda: own)
    port.__dict__["fused_gdn_decode_post_conv_mtp_triton"] = lambda **given: "triton"
    monkeypatch.setitem(sys.modules, GDN, layer)
    monkeypatch.setitem(sys.modules, PORT, port)
    states.install()
    assert (torch.float32, torch.bfloat16, torch.float16) == layer.FUSED_GDN_STATE_DTYPES
    assert layer.fused_mtp_decode_impl()(state=torch.empty(0, dtype=torch.float16)) == "triton"
    compared: list[Any] = []
    monkeypatch.setattr("sparkpin_modkit.selfcheck.once", lambda *given: compared.append(given[2]))
    for kind in ("auto", "float16"):
        states.check(SimpleNamespace(cache_config=SimpleNamespace(mamba_ssm_cache_dtype=kind)))
    assert compared == [{"states": "float16"}]


def test_a_release_without_the_kernel_compares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "check_vllm", lambda touches: "0.32.0")
    assert list(selfcheck.check()) == []


def test_a_release_without_the_two_kernels_declares_neither() -> None:
    for release, touches in ON_CUDA.items():
        assert (STATES.keys() <= touches.keys()) == (release in STATES_IN)
