"""The blocks of a second model that drafts (``draft_model``) for a model with linear attention.

vLLM 0.32.0 hands ``DraftModelProposer`` the block table of the first group of cache layers, where other proposers get
their own group's. Of a model with linear attention the first group holds its states: the drafter writes its keys and
values over them, and reads states as keys. States in float32 are NaN when read as bfloat16, and no draft is accepted;
in bfloat16 the drafts pass, but after a rejected one the model goes on from a state that the drafter overwrote.

The fault is in ``GPUModelRunner``, which the CPU platform inherits; in vLLM 0.33, too. No upstream issue was found.
May go with the first vLLM in which ``test_vllm_still_gives_the_first_group_s_blocks`` fails.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

from sparkpin_modkit import check_signature


def install() -> None:
    from vllm.v1.spec_decode.draft_model import DraftModelProposer
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = GPUModelRunner._build_attention_metadata
    check_signature(
        original,
        "self, num_tokens, num_reqs, max_query_len, num_tokens_padded, num_reqs_padded, ubatch_slices, logits_indices, "
        "max_num_sampled_tokens, use_spec_decode, for_cudagraph_capture, num_scheduled_tokens, slot_mappings",
    )

    @functools.wraps(original)
    def build_attention_metadata(self: Any, *args: Any, **options: Any) -> Any:
        layers, metadata = original(self, *args, **options)
        drafter = getattr(self, "drafter", None)
        if metadata is not None and isinstance(drafter, DraftModelProposer) and drafter.kv_cache_gid > 0:
            table = self.input_batch.block_table[drafter.kv_cache_gid]
            metadata = copy.copy(metadata)  # the first group's layers keep theirs
            metadata.block_table_tensor = table.get_device_tensor(metadata.num_reqs)
            metadata.slot_mapping = table.slot_mapping.gpu[: metadata.num_actual_tokens]
        return layers, metadata

    GPUModelRunner._build_attention_metadata = build_attention_metadata
