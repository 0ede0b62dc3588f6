"""The faults of sparkpin_cache_faults as vLLM 0.33's GPU runner ("V2") could have them. Empty on any other vLLM.

In 0.33 states are copied by kernels on the GPU, so what is copied is decided by the columns that they are given.
"""

from __future__ import annotations

import inspect
from typing import Any

from sparkpin_cache_faults import FAULTS as BEFORE
from sparkpin_cache_faults import of_another_prompt
from sparkpin_sabotage import Undo, put


def checked(owner: Any, name: str, *parameters: str) -> Any:
    """The function, if it still has these parameters, else RuntimeError: nothing is planted into an unknown vLLM."""
    found = inspect.getattr_static(owner, name)
    function = found.__func__ if isinstance(found, classmethod | staticmethod) else found
    seen = tuple(inspect.signature(function).parameters)
    if seen[: len(parameters)] != parameters:
        raise RuntimeError(f"{owner.__name__}.{name}: got {seen}, expected {parameters}: not the vLLM that this knows")
    return function


def states() -> Any:
    from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

    return MambaHybridModelState


def state_not_restored(undo: Undo) -> None:
    """A hit goes on from whatever its block held before: column -1 stands for a request without a state."""
    former = checked(states(), "add_request", "self", "req_index", "new_req_data")

    def add(self: Any, req_index: int, new_req_data: Any) -> None:
        former(self, req_index, new_req_data)
        if self._align_mode and new_req_data.num_computed_tokens:
            self._mamba_state_idx_gpu[req_index].fill_(-1)

    put(undo, states(), "add_request", add)


def state_late(undo: Undo) -> None:
    """A hit gets the state of a shorter one, where the cache has it."""
    from vllm.v1.core.single_type_kv_cache_manager import MambaManager as Manager

    former = checked(Manager, "find_longest_cache_hit", "cls", "block_hashes", "max_length")

    def find(cls: Any, block_hashes: Any, max_length: int, **named: Any) -> Any:
        found, length = former(cls, block_hashes, max_length, **named)
        if length:
            step = min(named["alignment_tokens"], named["kv_cache_spec"].block_size)
            for blocks, others in zip(found, former(cls, block_hashes, length - step, **named)[0], strict=True):
                blocks[-1:] = others[-1:] or blocks[-1:]
        return found, length

    put(undo, Manager, "find_longest_cache_hit", classmethod(find))


def hit_off_by_one(undo: Undo) -> None:
    """The first token after a hit is read as the hit's last one."""
    from vllm.v1.worker.gpu.states import RequestState

    order = ("self", "req_id", "prompt_len", "all_token_ids", "num_computed_tokens")
    former = checked(RequestState, "add_request", *order)

    def add(self: Any, *, all_token_ids: list[int], num_computed_tokens: int, prompt_len: int, **named: Any) -> None:
        ids, hit = list(all_token_ids), num_computed_tokens
        if 0 < hit < prompt_len:
            ids[hit] = ids[hit - 1]
        former(self, all_token_ids=ids, num_computed_tokens=hit, prompt_len=prompt_len, **named)

    put(undo, RequestState, "add_request", add)


def drafts_kept(undo: Undo) -> None:
    """Drafts that the model refused stay in the state, as if they had been said."""
    import torch

    before = checked(states(), "preprocess_state", "self", "input_batch")
    after = checked(states(), "postprocess_state", "self", "idx_mapping", "num_sampled")
    drafted = list[Any]()

    def preprocess(self: Any, input_batch: Any, *more: Any, **named: Any) -> None:
        drafted[:] = [input_batch.num_draft_tokens_per_req]
        before(self, input_batch, *more, **named)

    def postprocess(self: Any, idx_mapping: Any, num_sampled: Any, *more: Any, **named: Any) -> None:
        count = drafted[0] if drafted else None
        if count is not None and not isinstance(num_sampled, int):
            own, num_sampled = num_sampled[: len(count)], num_sampled.clone()
            said = torch.from_numpy(count[: len(own)] + 1).to(own)
            num_sampled[: len(own)] = torch.where(own > 0, torch.maximum(own, said), own)
        after(self, idx_mapping, num_sampled, *more, **named)

    put(undo, states(), "preprocess_state", preprocess)
    put(undo, states(), "postprocess_state", postprocess)


def neighbours_block(undo: Undo) -> None:
    """Of full attention's blocks, which are many, a hit gets one that another prompt wrote."""
    from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator as Coordinator
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    former = checked(Coordinator, "find_longest_cache_hit", "self", "block_hashes", "max_cache_hit_length")

    def find(self: Any, block_hashes: Any, max_cache_hit_length: int) -> Any:
        hit = former(self, block_hashes, max_cache_hit_length)
        for group, blocks in enumerate(hit[0]):
            manager = self.single_type_managers[group]
            if isinstance(manager, FullAttentionManager):
                of_another_prompt(blocks, group, manager.block_pool)
        return hit

    put(undo, Coordinator, "find_longest_cache_hit", find)


def stale_after_eviction(undo: Undo) -> None:
    """A block that went to another request is still found under its former hash."""
    from vllm.v1.core.block_pool import BlockPool

    checked(BlockPool, "get_cached_block", "self", "block_hash", "kv_cache_group_ids")
    checked(BlockPool, "_maybe_evict_cached_block", "self", "block")
    BEFORE["stale-after-eviction"](undo)


def version() -> str:
    import vllm

    return str(vllm.__version__)


FAULTS = {
    "state-not-restored": state_not_restored,
    "state-one-block-late": state_late,
    "neighbours-block": neighbours_block,
    "stale-after-eviction": stale_after_eviction,
    "hit-off-by-one": hit_off_by_one,
    "drafts-kept": drafts_kept,
} if version().startswith("0.33.") else {}  # fmt: skip
