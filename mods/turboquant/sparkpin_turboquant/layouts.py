"""The cache's size and layout for vLLM since 0.32, where a backend adjusts a spec that the layer has made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm.v1.kv_cache_interface import KVCacheLayout

from sparkpin_turboquant.common import PackedBackend, vllm_slot_bytes
from sparkpin_turboquant.formats import FORMATS


class LayoutBackend(PackedBackend):
    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBNHC,)

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        if spec.state_content_bytes is not None or not spec.kv_quant_mode.is_turboquant:
            return spec
        return replace(
            spec, state_content_bytes=vllm_slot_bytes(FORMATS[spec.kv_quant_mode.name.lower()], spec.head_size)
        )
