"""The backend for vLLM 0.20.2, on its real Python code. Not collected in an image: its vLLM is a later one.

Run by the project's test_mods_on_vllm.py. There is no GPU: no kernel runs, and FlashAttention is not looked for.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import sparkpin_turboquant
import torch
from sparkpin_modkit import UnsupportedPlatform
from sparkpin_turboquant import before_layouts
from sparkpin_turboquant.formats import FORMATS
from sparkpin_turboquant.touches import BEFORE_LAYOUTS
from vllm import __version__
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention.attention import Attention
from vllm.platforms.interface import Platform
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.kv_cache_interface import TQFullAttentionSpec

NAME = "turboquant_4bit_nc"


def test_this_is_such_a_vllm() -> None:
    assert __version__.partition("+")[0] in BEFORE_LAYOUTS


def test_a_cpu_stops(unregistered: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: True)
    with pytest.raises(SystemExit) as caught:
        sparkpin_turboquant.register()
    assert isinstance(caught.value.__cause__, UnsupportedPlatform)
    assert "SPARKPIN_MOD_TURBOQUANT=0" in str(caught.value.__cause__)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The three methods, set back afterwards. Seen: the cache type of each configuration that vLLM was asked for."""
    seen: list[str] = []

    def create(self: Any, usage_context: Any = None, headless: bool = False) -> Any:
        """As vLLM's own: that takes a model's files."""
        seen.append(self.kv_cache_dtype)
        if self.kv_cache_dtype.startswith("turboquant_") and self.hybrid:
            raise NotImplementedError("TurboQuant KV cache is not supported for hybrid (attention + Mamba) models.")
        return SimpleNamespace(cache_config=SimpleNamespace(cache_dtype=self.kv_cache_dtype))

    monkeypatch.setattr(EngineArgs, "create_engine_config", create)
    monkeypatch.setattr(Platform, "_align_hybrid_block_size", Platform.__dict__["_align_hybrid_block_size"])
    monkeypatch.setattr(Attention, "_init_turboquant_buffers", Attention._init_turboquant_buffers)
    before_layouts.install()
    return seen


@pytest.mark.parametrize(
    ("wanted", "hybrid", "asked"),
    [(NAME, True, [NAME, "auto"]), (NAME, False, [NAME]), ("auto", True, ["auto"]), ("fp8", True, ["fp8"])],
)
def test_hybrid_models_are_configured_without_the_type_and_then_have_it(
    installed: list[str], wanted: str, hybrid: bool, asked: list[str]
) -> None:
    arguments = SimpleNamespace(kv_cache_dtype=wanted, hybrid=hybrid)
    config = EngineArgs.create_engine_config(arguments)
    assert installed == asked
    assert config.cache_config.cache_dtype == arguments.kv_cache_dtype == wanted


def test_what_else_vllm_refuses_stays_refused(installed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = SimpleNamespace(kv_cache_dtype="turboquant_2bit", hybrid=True)
    with pytest.raises(NotImplementedError, match="hybrid"):
        EngineArgs.create_engine_config(arguments)
    assert installed == ["turboquant_2bit"]


class Hybrid:
    """Two linear layers' worth of state: 131,072 and 6,144 bytes."""

    @staticmethod
    def get_mamba_state_shape_from_config(config: Any) -> tuple[tuple[int, ...], ...]:
        return (3, 1024), (4, 128, 128)

    @staticmethod
    def get_mamba_state_dtype_from_config(config: Any) -> tuple[torch.dtype, ...]:
        return torch.bfloat16, torch.bfloat16


@pytest.mark.parametrize(("mode", "state_block"), [("align", 1024), ("none", None)])
def test_pages_of_attention_and_states_match(
    installed: list[str], monkeypatch: pytest.MonkeyPatch, mode: str, state_block: int | None
) -> None:
    monkeypatch.setattr(before_layouts, "get_model_cls", lambda model: Hybrid)
    cache = SimpleNamespace(
        cache_dtype=NAME, block_size=16, mamba_cache_mode=mode, mamba_block_size=None, mamba_page_size_padded=None
    )
    model = SimpleNamespace(get_num_kv_heads=lambda parallel: 2, get_head_size=lambda: 64)
    config = SimpleNamespace(cache_config=cache, model_config=model, parallel_config=None)
    Platform._align_hybrid_block_size(config, before_layouts.TurboQuantBackend)
    assert (cache.block_size, cache.mamba_block_size, cache.mamba_page_size_padded) == (1024, state_block, 143_360)
    spec = TQFullAttentionSpec(
        block_size=1024, num_kv_heads=2, head_size=64, head_size_v=64, dtype=torch.uint8, tq_slot_size=70
    )
    assert spec.page_size_bytes == cache.mamba_page_size_padded
    cache.mamba_cache_mode = "all"
    with pytest.raises(NotImplementedError, match="'all'"):
        Platform._align_hybrid_block_size(config, before_layouts.TurboQuantBackend)


def test_no_memory_for_kernels_that_do_not_run(installed: list[str]) -> None:
    layer = SimpleNamespace()
    Attention._init_turboquant_buffers(layer, NAME, 64, "layers.0")
    assert vars(layer) == {}


@pytest.mark.parametrize("name", list(FORMATS))
def test_the_cache_is_read_as_it_is_shaped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(before_layouts.Impl, "find_flash", lambda self: None)
    layer = before_layouts.Impl(8, 128, 0.1, 2, kv_cache_dtype=name)
    shape = before_layouts.TurboQuantBackend.get_kv_cache_shape(3, 256, 2, 128, name)
    kv_cache = torch.zeros(shape, dtype=torch.uint8)
    found = layer.cache(kv_cache)
    assert (found.block_size, found.slot, found.heads, found.block_bytes) == (256, shape[3], 2, kv_cache.stride(0))
    assert found.data.data_ptr() == kv_cache.data_ptr()


def test_verification_stays_in_full_graphs() -> None:
    support = before_layouts.Builder.get_cudagraph_support(None, None)
    assert support is AttentionCGSupport.UNIFORM_BATCH
