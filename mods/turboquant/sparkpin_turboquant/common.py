"""What the attention backends of both platforms share: the slot's size, the cache's layout, and what they refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from sparkpin_modkit import report
from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionType
from vllm.v1.kv_cache_interface import KVCacheLayout

from sparkpin_turboquant import MOD, VERSION
from sparkpin_turboquant.formats import FORMATS, Format, format_of
from sparkpin_turboquant.rotation import check_head_dim


def vllm_slot_bytes(format: Format, head_dim: int) -> int:
    """Bytes that vLLM reserves for a slot, at least ``format.slot_bytes``.

    When vLLM matches attention pages to GDN state pages it asks its own preset for this size, not the backend.
    """
    check_head_dim(head_dim)
    size = int(TurboQuantConfig.from_cache_dtype(format.name, head_dim).slot_size_aligned)
    if size < format.slot_bytes(head_dim):
        raise ValueError(
            f"turboquant: vLLM reserves {size} bytes for head_dim {head_dim}, expected {format.slot_bytes(head_dim)}"
        )
    return size


def report_active(head_dim: int, layers: int, slot: int) -> None:
    """Said once for each KV cache group, when its metadata builder is made: the proof that the mod is in use."""
    report(MOD, "active", version=VERSION, head_dim=head_dim, layers=layers, slot_bytes=slot, bf16_bytes=4 * head_dim)


class PackedBackend(AttentionBackend):
    """Chosen by ``--kv-cache-dtype turboquant_*``."""

    forward_includes_kv_cache_update = False
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(FORMATS)

    @staticmethod
    def get_name() -> str:
        return "TURBOQUANT"

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        """Raises ValueError for a TurboQuant type that is none of ours: no other backend should serve it instead."""
        return (kv_cache_dtype or "").startswith("turboquant_") and bool(format_of(str(kv_cache_dtype)))

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBNHC,)

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Give a spec that the layer has made the size of our slot."""
        if spec.state_content_bytes is not None or not spec.kv_quant_mode.is_turboquant:
            return spec
        format = format_of(spec.kv_quant_mode.name.lower())
        return replace(spec, state_content_bytes=vllm_slot_bytes(format, spec.head_size))


class PackedImpl(AttentionImpl):
    """Causal decoder attention; what it cannot do is refused when the layer is made."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **others: Any,
    ) -> None:
        unsupported = {
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap or None,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
            "sinks": sinks,
            **others,
        }
        for name, value in unsupported.items():
            if value is not None:
                raise NotImplementedError(f"turboquant: attention with {name}; omit --kv-cache-dtype {kv_cache_dtype}")
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"turboquant: attention {attn_type!r}, expected decoder")
        check_head_dim(head_size)
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.format = format_of(kv_cache_dtype)

    def rows(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """A cache ``[blocks, Hkv, block_size, slot]`` as vLLM hands it over -> its blocks as bytes, ``[blocks, *]``."""
        cache = kv_cache.view(torch.uint8)
        count, heads, block_size, slot = cache.shape
        if (cache.stride(2), cache.stride(3)) != (heads * slot, 1) or (heads > 1 and cache.stride(1) != slot):
            raise ValueError(f"turboquant: cache of strides {cache.stride()}, expected heads inside tokens")
        return cache.as_strided((count, heads * block_size * slot), (cache.stride(0), 1))
