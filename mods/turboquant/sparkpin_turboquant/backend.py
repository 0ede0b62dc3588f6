"""Reference attention backend for vLLM's CPU platform, with the cache of `naive`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from sparkpin_modkit import report
from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheLayout

from sparkpin_turboquant import MOD, VERSION, naive
from sparkpin_turboquant.formats import FORMATS, Format
from sparkpin_turboquant.rotation import check_head_dim


def vllm_slot_bytes(format: Format, head_dim: int) -> int:
    """Bytes that vLLM reserves for a slot, at least ``format.slot_bytes``.

    When vLLM matches attention pages to GDN state pages it asks its own preset for this size, not the backend.
    """
    check_head_dim(head_dim)
    size = int(TurboQuantConfig.from_cache_dtype(format.name, head_dim).slot_size_aligned)
    if size < format.slot_bytes(head_dim):
        raise ValueError(
            f"turboquant: vLLM reserves {size} bytes for head_dim {head_dim}, wanted {format.slot_bytes(head_dim)}"
        )
    return size


class TurboQuantBackend(AttentionBackend):
    """Chosen by ``--kv-cache-dtype turboquant_*``."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(FORMATS)

    @staticmethod
    def get_name() -> str:
        return "TURBOQUANT"

    @staticmethod
    def get_impl_cls() -> type[TurboQuantImpl]:
        return TurboQuantImpl

    @staticmethod
    def get_builder_cls() -> type[TurboQuantMetadataBuilder]:
        return TurboQuantMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

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

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER


@dataclass
class TurboQuantMetadata:
    """What one step needs, on the host: requests' query ranges, context lengths and blocks."""

    query_start: list[int]
    seq_lens: list[int]
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


class TurboQuantMetadataBuilder(AttentionMetadataBuilder):
    """Built once for each KV cache group after the cache is allocated: the proof that the mod is in use."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        head_dim = kv_cache_spec.head_size
        report(
            MOD,
            "active",
            version=VERSION,
            head_dim=head_dim,
            layers=len(layer_names),
            slot_bytes=kv_cache_spec.state_content_bytes,
            bf16_bytes=4 * head_dim,
        )

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> TurboQuantMetadata:
        common = common_attn_metadata
        if not common.causal:
            raise NotImplementedError("turboquant: attention that is not causal")
        return TurboQuantMetadata(
            query_start=common.query_start_loc_cpu.tolist(),
            seq_lens=common.seq_lens.tolist(),
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
        )


class TurboQuantImpl(AttentionImpl):
    """Causal decoder attention over a cache ``[blocks, Hkv, block_size, slot]`` of uint8."""

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
    ) -> None:
        unsupported = {
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap or None,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
            "sinks": sinks,
        }
        for name, value in unsupported.items():
            if value is not None:
                raise NotImplementedError(f"turboquant: attention with {name}; omit --kv-cache-dtype {kv_cache_dtype}")
        if kv_cache_dtype not in FORMATS or attn_type != AttentionType.DECODER:
            raise NotImplementedError(
                f"turboquant: kv_cache_dtype {kv_cache_dtype!r}, attention {attn_type!r}; "
                f"wanted decoder and one of {', '.join(FORMATS)}"
            )
        check_head_dim(head_size)
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Encode ``key``, ``value`` ``[>= T, Hkv, D]`` into the slots ``slot_mapping`` ``[T]`` (negative: padding)."""
        slots = slot_mapping.flatten()
        kept = (slots >= 0).nonzero().flatten()
        slots = slots[kept]
        shape = (-1, self.num_kv_heads, self.head_size)
        self.blocks(kv_cache).write(key[kept].view(shape), value[kept].view(shape), slots)

    def blocks(self, kv_cache: torch.Tensor) -> naive.Blocks:
        """The cache ``[blocks, Hkv, block_size, slot]`` that vLLM hands over, whose blocks are used as bytes."""
        cache = kv_cache.view(torch.uint8)
        count, heads, block_size, slot = cache.shape
        if (cache.stride(2), cache.stride(3)) != (heads * slot, 1) or (heads > 1 and cache.stride(1) != slot):
            raise ValueError(f"turboquant: cache of strides {cache.stride()}, wanted heads inside tokens")
        data = cache.as_strided((count, heads * block_size * slot), (cache.stride(0), 1))
        return naive.Blocks(data, FORMATS[self.kv_cache_dtype], heads, self.head_size, block_size, slot)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TurboQuantMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``query`` ``[T, H, D]`` -> `output`, by `naive.attention` over each request's slots."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("turboquant: fused output quantisation")
        if attn_metadata is None:  # profiling run, before there is a cache
            return output
        blocks = self.blocks(kv_cache)
        out = output.view(-1, self.num_heads, self.head_size)
        queries = query.view(-1, self.num_heads, self.head_size)
        for request, length in enumerate(attn_metadata.seq_lens):
            start, end = attn_metadata.query_start[request : request + 2]
            if start == end or length == 0:
                continue
            slots = slots_of(attn_metadata.block_table[request], length, blocks.block_size)
            out[start:end] = naive.attend(queries[start:end], blocks, slots, self.scale).to(out.dtype)
        return output


def slots_of(blocks: torch.Tensor, length: int, block_size: int) -> torch.Tensor:
    """``[length]`` slots of a request's tokens, from its row of the block table."""
    position = torch.arange(length, device=blocks.device)
    return blocks[position // block_size].long() * block_size + position % block_size
