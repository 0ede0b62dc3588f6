"""Reference attention backend for vLLM's CPU platform, with the cache of `naive`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionMetadataBuilder, MultipleOf

from sparkpin_turboquant import naive
from sparkpin_turboquant.common import PackedBackend, PackedImpl, report_active


class TurboQuantBackend(PackedBackend):
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16, torch.float32]

    @staticmethod
    def get_impl_cls() -> type[TurboQuantImpl]:
        return TurboQuantImpl

    @staticmethod
    def get_builder_cls() -> type[TurboQuantMetadataBuilder]:
        return TurboQuantMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]


@dataclass
class TurboQuantMetadata:
    """What one step needs, on the host: requests' query ranges, context lengths and blocks."""

    query_start: list[int]
    seq_lens: list[int]
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


class TurboQuantMetadataBuilder(AttentionMetadataBuilder):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        report_active(kv_cache_spec.head_size, len(layer_names), kv_cache_spec.state_content_bytes)

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


class TurboQuantImpl(PackedImpl):
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
        _, heads, block_size, slot = kv_cache.view(torch.uint8).shape
        return naive.Blocks(self.rows(kv_cache), self.format, heads, self.head_size, block_size, slot)

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
