"""A KV connector that has every prompt but its last token in the cache already: random bytes instead of prefill.

vLLM's own DecodeBenchConnector writes zeros into packed caches and overwrites the states of all sequences with each.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA

SMALL = 0xBB
"""Bytes & SMALL are small numbers of either sign in float16, bfloat16 and float32, and never NaN."""


class Fill:
    on = True
    """Off: requests are computed from their first token on."""


class Blocks(KVConnectorMetadata):
    def __init__(self, groups: list[list[int]]) -> None:
        self.groups = groups


class FilledCache(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.config = kv_cache_config
        self.seen: set[str] = set()
        self.new: list[list[int]] = [[] for _ in kv_cache_config.kv_cache_groups]

    # The scheduler's side.
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if not Fill.on or request.request_id in self.seen:
            return 0, False
        return max(0, request.num_tokens - num_computed_tokens - 1), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self.seen.add(request.request_id)
            for mine, group in zip(self.new, blocks.blocks, strict=True):
                mine.extend(block.block_id for block in group if not block.is_null)

    def build_connector_meta(self, scheduler_output: Any) -> Blocks:
        found, self.new = self.new, [[] for _ in self.new]
        return Blocks(found)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        return False, None

    # The worker's side.
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        groups = self._get_connector_metadata().groups  # type: ignore[attr-defined]
        for group, blocks in zip(self.config.kv_cache_groups, groups, strict=True):
            for layer in group.layer_names:
                cache = self.caches[layer]
                for tensor in cache if isinstance(cache, list | tuple) else (cache,):
                    rows = tensor.shape[0] // self.config.num_blocks
                    for block in blocks:
                        fill(tensor[block * rows : (block + 1) * rows])

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Filled in one stream, before the step's kernels."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is kept."""

    def wait_for_save(self) -> None:
        """Nothing is kept."""


def fill(part: torch.Tensor) -> None:
    """In place; `part` may have gaps."""
    if part.dtype.is_floating_point:
        part.normal_(0, 0.5)
    else:
        part.view(torch.uint8).random_(0, 256).bitwise_and_(SMALL)
