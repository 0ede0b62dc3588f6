"""New tokens after a compressed history beside FlashAttention 3 on bfloat16, and vLLM's own decode kernel beside ours.

usage: PYTHONPATH=what_peers.py_made python prefill.py speed|stock OUT.json
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial

import torch
from run import BLOCK, GPU, HK, SCALE, D, G, Ours, ours, replays, warm_all
from sparkpin_turboquant import cuda, history, kernel, prefill
from sparkpin_turboquant.tuned import piece_of, tuned_for

ROOMS = (16384, 32768, 65536, 131072)
STOCK_BLOCK = 128


def flash(scale):
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    def attend(query, key, value, query_starts, key_starts, most_queries, most_keys, causal, out):
        return flash_attn_varlen_func(
            query, key, value, max_seqlen_q=most_queries, cu_seqlens_q=query_starts, max_seqlen_k=most_keys,
            cu_seqlens_k=key_starts, softmax_scale=scale, causal=causal, return_softmax_lse=True, out=out, fa_version=3,
        )[:2]  # fmt: skip

    return attend


PAGE = 1152  # of bfloat16, as vLLM's hybrid allocator makes them


class Bf16:
    """Keys and values as they lie in memory, `many` times: one after another, and in pages in any order."""

    def __init__(self, length, many):
        pages = -(-length // PAGE)
        self.k, self.v = (torch.randn(many, pages * PAGE, HK, D, device=GPU).bfloat16() for _ in range(2))
        self.tables = torch.randperm(many * pages, device=GPU).int().view(many, 1, pages)

    def paged(self, query, i, starts, length, out):
        from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

        k, v = (x.view(-1, PAGE, HK, D) for x in (self.k, self.v))
        flash_attn_varlen_func(
            query, k, v, max_seqlen_q=query.shape[0], cu_seqlens_q=starts, max_seqlen_k=int(length), out=out,
            seqused_k=self.used, block_table=self.tables[i], softmax_scale=SCALE, causal=True, fa_version=3,
        )  # fmt: skip


def starts_of(*numbers):
    return torch.tensor([0, *numbers], dtype=torch.int32, device=GPU)


def over(tables, call, rounds=12):
    return replays([partial(call, table) for table in tables], rounds)


def expansion(cached, context, room):
    space = prefill.Workspace.of(HK, D, torch.device(GPU), room)
    parts = prefill.plan([0, 1], [context + 1], torch.device(GPU), room).parts
    t = over(cached.tables[:8], lambda table: [space.read(cached.cache, table, part.pieces) for part in parts])
    moved = cached.bytes + context * HK * D * 4
    print("expand", context, room, round(t, 1), "us", round(moved / t / 1e3), "GB/s", flush=True)
    return {"expand": context, "room": room, "us": t, "bytes": moved}


def rooms(context):
    """Rounds worth a try; the longest takes all of the history at once."""
    return [room for room in ROOMS if room <= max(context, ROOMS[0])]


def case(cached, peer, context, new, tuned, processors):
    """`new` tokens after `context`: bfloat16; as decode in pieces, by expansion in rounds of several sizes, joined.

    `shipped_us` is what tuned.json chooses; `joined_us` what "joined" there would switch on, `joined_alone_us` that
    without kernels that overlap.
    """
    attend, device, tables = flash(SCALE), torch.device(GPU), cached.tables[:8]
    query = torch.randn(new, HK * G, D, device=GPU).bfloat16()
    out = torch.empty_like(query)
    key, value = peer.k[0, :new], peer.v[0, :new]
    a, b, all_ = starts_of(new), starts_of(context + new), context + new

    def bf16(i):
        attend(query, peer.k[i, :all_], peer.v[i, :all_], a, b, new, all_, True, out)

    peer.used = b[1:]
    row = {"new": new, "history": context, "bf16_us": over(range(peer.k.shape[0]), bf16)}
    row["paged_us"] = over(range(peer.k.shape[0]), lambda i: peer.paged(query, i, a, all_, out))
    if new <= 64:
        few = prefill.plan([0, new], [all_], device, 16, 64, piece_of(G)).few
        at, how = (few.lengths, few.starts, few.most_queries), (SCALE, out, tuned, processors, few.owners)
        row["few_us"] = over(tables, lambda table: cuda.attend(query, cached.cache, table, *at, *how))
    for room in rooms(context):
        if new >= 64 or room >= min(65536, context):
            space = prefill.Workspace.of(HK, D, device, room)
            planned = prefill.plan([0, new], [all_], device, room)
            how = (planned, space, attend, out)
            row[f"room_{room}_us"] = over(
                tables, lambda table, how=how: prefill.attend(query, key, value, cached.cache, table, *how)
            )
    at_once = prefill.plan([0, new], [all_], device, all_ + 16, joined=new)
    space = prefill.Workspace.of(HK, D, device, all_ + 16)
    for name, overlap in (("joined_us", tuned.overlap), ("joined_alone_us", False)):
        how = (at_once, space, attend, out, overlap)
        row[name] = over(tables, lambda table, how=how: prefill.attend(query, key, value, cached.cache, table, *how))
    chosen = f"room_{max(rooms(context))}_us"
    if new <= tuned.few:
        chosen = "few_us"
    elif new <= tuned.joined and all_ <= prefill.room_of(HK, D):
        chosen = "joined_us"
    row["shipped_us"] = row[chosen]
    row["turn_us"] = over(range(4), lambda i: history.turn(query, cached.cache))
    print({k: round(v, 1) for k, v in row.items()}, flush=True)
    return row


def speed(tuned, processors):
    name, rows = "turboquant_4bit_nc", []
    warm_all(ours(tuned, (64,), (name,)))
    for context in (8192, 32768, 131072):
        cached = Ours(name, context, 1)
        rows += [expansion(cached, context, room) for room in ROOMS]
        peer = Bf16(context + 2048, min(len(cached.tables), 4))
        rows += [case(cached, peer, context, new, tuned, processors) for new in (4, 8, 16, 32, 64, 128, 256, 512, 2048)]
    return rows


def stock_case(head_dim, context, queries, splits):
    from vllm.v1.attention.ops.triton_turboquant_decode import triton_turboquant_decode_attention

    blocks = context // STOCK_BLOCK
    data = torch.randint(0, 58, (2 * blocks, STOCK_BLOCK, HK, head_dim + 6), dtype=torch.uint8, device=GPU)
    tables = torch.randperm(2 * blocks, device=GPU).int().view(2, 1, blocks)
    turn = torch.eye(head_dim, device=GPU)
    levels = torch.linspace(-2.7, 2.7, 16, device=GPU) / head_dim**0.5
    q = torch.randn(queries, HK * G, head_dim, device=GPU).bfloat16()
    lengths = torch.full((queries,), context, dtype=torch.int32, device=GPU)

    def call(table):
        triton_turboquant_decode_attention(
            q, data, table.expand(queries, -1), lengths, turn, levels, head_dim**-0.5, 4, head_dim // 2 + 2, 4,
            norm_correction=True, PiT=turn, max_num_kv_splits=splits,
        )  # fmt: skip

    return over(tables, call, 5)


def stock(tuned, processors):
    """vLLM's 4bit_nc kernels as its backend calls them: one query token a sequence, so three are three sequences."""
    rows = []
    for context in (8192, 32768, 131072):
        cached = Ours("turboquant_4bit_nc", context, 1)
        for queries in (1, 3):
            us = cached.time(queries, tuned, processors)
            for head_dim, splits in ((256, 32), (256, 128), (128, 32)):
                t = stock_case(head_dim, context, queries, splits)
                row = {"stock": context, "head_dim": head_dim, "queries": queries, "splits": splits, "us": t}
                if head_dim == D:
                    row |= {"ours_us": us, "times": t / us}
                rows.append(row)
                print({k: round(v, 1) for k, v in row.items()}, flush=True)
    return rows


def main():
    what, file = sys.argv[1:3]
    began = time.time()
    properties = torch.cuda.get_device_properties(0)
    tuned = tuned_for(properties.major * 10 + properties.minor)
    print(properties.name, kernel.EXPAND_WARPS, BLOCK, flush=True)
    found = {"speed": speed, "stock": stock}[what](tuned, properties.multi_processor_count)
    with open(file, "w") as out:
        json.dump(found, out, indent=1)
    print(what, round(time.time() - began), "s", flush=True)


if __name__ == "__main__":
    main()
