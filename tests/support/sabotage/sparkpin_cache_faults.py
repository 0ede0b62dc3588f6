"""Faults of a prefix cache, and of drafts, that vLLM 0.32 could have: for sparkpin_sabotage, which switches them.

Each stands for a kind of bug that was reported of hybrid models. None touches what is computed without a hit.
"""

from __future__ import annotations

import functools
from typing import Any

from sparkpin_sabotage import Undo, put


def of_hits(undo: Undo, change: Any) -> None:
    """change(requests, collect, *args): in the place of `collect_mamba_copy_meta`, which copies a request's state to
    where it goes on. requests: ids of those that begin in this step, so that their state is a hit's."""
    from vllm.v1.worker import gpu_model_runner, mamba_utils

    former, collect = mamba_utils.preprocess_mamba, mamba_utils.collect_mamba_copy_meta
    new = set[str]()

    @functools.wraps(former)
    def preprocess(scheduled: Any, kv: Any, cache: Any, known: Any, batch: Any, *more: Any, **named: Any) -> Any:
        mamba_utils.cleanup_mamba_state_idx(scheduled, known)
        new.clear()
        new.update(one for one in batch.req_ids if one not in known)
        return former(scheduled, kv, cache, known, batch, *more, **named)

    put(undo, mamba_utils, "preprocess_mamba", preprocess)
    put(undo, mamba_utils, "collect_mamba_copy_meta", lambda *args: change(new, collect, *args))
    assert gpu_model_runner.mamba_utils is mamba_utils


def state_not_restored(undo: Undo) -> None:
    """A hit goes on from whatever its block held before."""

    def change(new: set[str], collect: Any, *args: Any) -> None:
        if args[7].req_id not in new:
            collect(*args)

    of_hits(undo, change)


def state_late(undo: Undo) -> None:
    """A block keeps the state of the block before it, once the request that made it has gone on."""

    def change(new: set[str], collect: Any, *args: Any) -> None:
        collect(*args)
        source, request = args[4], args[7]
        if request.req_id not in new and source > 0:
            collect(*args[:4], source - 1, source, *args[6:])

    of_hits(undo, change)


def drafts_kept(undo: Undo) -> None:
    """Drafts that the model refused stay in the state, as if they had been said."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as Runner

    former = Runner._update_states_after_model_execute

    def update(self: Any, tokens: Any, scheduled: Any) -> None:
        said = tokens.clone()
        for row, request in enumerate(self.input_batch.req_ids[: len(said)]):
            drafted = len(scheduled.scheduled_spec_decode_tokens.get(request, ()))
            said[row, : drafted + 1] = said[row, : drafted + 1].clamp(min=0)
        former(self, said, scheduled)

    put(undo, Runner, "_update_states_after_model_execute", update)


def found_block(undo: Undo, change: Any) -> None:
    """change(pool, hash, group, block): in the place of the block that the cache has for a hash; None for none."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

    former = BlockPool.get_cached_block

    def get(self: Any, block_hash: Any, groups: Any) -> Any:
        found = former(self, block_hash, groups)
        ids = [make_block_hash_with_group_id(block_hash, group) for group in groups]
        changed = [change(self, one, found and found[place]) for place, one in enumerate(ids)]
        return None if None in changed else changed

    put(undo, BlockPool, "get_cached_block", get)


def of_another_prompt(blocks: list[Any], group: int, pool: Any) -> None:
    """The last of a hit's blocks becomes the first one that another prompt of that group has in the cache."""
    own, ending = {block.block_id for block in blocks}, group.to_bytes(4, "big")
    others = (
        block for block in pool.blocks
        if block.block_hash is not None and block.block_id not in own and not block.is_null
        and block.block_hash[-4:] == ending
    )  # fmt: skip
    blocks[-1:] = [next(others, blocks[-1])] if blocks else []


def neighbours_block(undo: Undo) -> None:
    """Of full attention's blocks, which are many, a hit gets one that another prompt wrote."""
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager as Manager

    former = Manager.find_longest_cache_hit.__func__

    def find(cls: Any, block_hashes: Any, max_length: int, kv_cache_group_ids: Any, block_pool: Any, *more: Any,
             **named: Any) -> Any:  # fmt: skip
        found, length = former(cls, block_hashes, max_length, kv_cache_group_ids, block_pool, *more, **named)
        for group, blocks in zip(kv_cache_group_ids, found, strict=True):
            of_another_prompt(blocks, group, block_pool)
        return found, length

    put(undo, Manager, "find_longest_cache_hit", classmethod(find))


def stale_after_eviction(undo: Undo) -> None:
    """A block that went to another request is still found under its former hash."""
    from vllm.v1.core.block_pool import BlockPool

    gone = dict[Any, Any]()
    former = BlockPool._maybe_evict_cached_block

    def evict(self: Any, block: Any) -> Any:
        before = block.block_hash
        done = former(self, block)
        if done and before is not None:
            gone[before] = block
        return done

    put(undo, BlockPool, "_maybe_evict_cached_block", evict)
    found_block(undo, lambda pool, key, block: block or gone.get(key))


def hit_off_by_one(undo: Undo) -> None:
    """The first token after a hit is read as the hit's last one."""
    from vllm.v1.worker.gpu_input_batch import InputBatch

    former = InputBatch.add_request

    def add(self: Any, request: Any) -> Any:
        row, hit = former(self, request), request.num_computed_tokens
        if 0 < hit < request.num_prompt_tokens:
            self.token_ids_cpu[row, hit] = self.token_ids_cpu[row, hit - 1]
        return row

    put(undo, InputBatch, "add_request", add)


FAULTS = {
    "state-not-restored": state_not_restored,
    "state-one-block-late": state_late,
    "neighbours-block": neighbours_block,
    "stale-after-eviction": stale_after_eviction,
    "hit-off-by-one": hit_off_by_one,
    "drafts-kept": drafts_kept,
}
