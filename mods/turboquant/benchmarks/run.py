"""A sweep of tiles, or the benchmark, on the GPU that is there. usage: python run.py sweep|bench OUT.json"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import time

import bf16
import torch
import triton
from sparkpin_turboquant import cuda, kernel, naive
from sparkpin_turboquant.formats import FORMATS
from sparkpin_turboquant.tuned import Tuned, tuned_for

D, HK, G = 256, 2, 16
BLOCK = 4608  # what vLLM's hybrid allocator makes of this model, see README
BF16_BLOCK = 1152
SCALE = D**-0.5
GPU = "cuda"


def replays(calls, rounds=12):
    """Median microseconds of one call, all of `calls` captured in one CUDA graph."""
    torch.cuda.synchronize()  # the inputs were made on another stream
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        graph.replay()
        graph.replay()
        times = []
        for _ in range(rounds):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record(stream)
            graph.replay()
            b.record(stream)
            b.synchronize()
            times.append(a.elapsed_time(b) * 1000 / len(calls))
    return statistics.median(times)


def copies(total_bytes):
    """Enough caches that one is not in L2 when its turn comes again."""
    return max(2, min(48, int(300e6 // total_bytes) + 1))


class Ours:
    def __init__(self, name, context, batch, block=BLOCK):
        self.format, self.context, self.batch = FORMATS[name], context, batch
        slot = self.format.slot_bytes(D) + (2 if name == "turboquant_4bit_nc" else 0)
        per = -(-context // block)
        self.bytes = batch * HK * context * self.format.slot_bytes(D)
        many = copies(self.bytes)
        size = HK * block * slot
        data = torch.randint(0, 256, (many * batch * per, size), dtype=torch.uint8, device=GPU)
        blocks = naive.Blocks(data, self.format, HK, D, block, slot)
        for norms in (blocks.key_norms, blocks.value_norms):
            norms.copy_((torch.rand(*norms.shape[:-1], 1, device=GPU) * 0.05 + 0.03).half().view(torch.uint8))
        self.cache = cuda.Cache(data, self.format, HK, D, block, slot, size)
        self.tables = torch.randperm(many * batch * per, device=GPU).int().view(many, batch, per)
        self.lengths = torch.full((batch,), context, dtype=torch.int32, device=GPU)

    def time(self, queries, tuned, processors):
        q = torch.randn(self.batch * queries, HK * G, D, device=GPU, dtype=torch.bfloat16)
        out = torch.empty_like(q)
        starts = torch.arange(0, self.batch * queries + 1, queries, dtype=torch.int32, device=GPU)
        return replays([
            lambda t=t: cuda.attend(q, self.cache, t, self.lengths, starts, queries, SCALE, out, tuned, processors)
            for t in self.tables
        ])  # fmt: skip


class Peer:
    def __init__(self, context, batch):
        per = -(-context // BF16_BLOCK)
        self.batch, self.bytes = batch, batch * HK * context * D * 4
        many = copies(self.bytes)
        shape = (many * batch * per, BF16_BLOCK, HK, D)
        self.k, self.v = (torch.empty(shape, device=GPU, dtype=torch.bfloat16).normal_() for _ in range(2))
        self.tables = torch.randperm(shape[0], device=GPU).int().view(many, batch, per)
        self.lengths = torch.full((batch,), context, dtype=torch.int32, device=GPU)

    def time(self, queries, splits, n, warps, stages):
        q = torch.randn(self.batch * queries, HK * G, D, device=GPU, dtype=torch.bfloat16)
        out = torch.empty_like(q)
        return replays([
            lambda t=t: bf16.attend(q, self.k, self.v, t, self.lengths, queries, SCALE, out, splits, n, warps, stages)
            for t in self.tables
        ])  # fmt: skip

    def best(self, queries, processors):
        found = []
        for n, warps, stages in PEER_TILES[min(queries, 4)]:
            for waves in (1, 2, 3, 4):
                splits = max(1, processors * waves // (HK * self.batch))
                try:
                    found.append((self.time(queries, splits, n, warps, stages), (splits, n, warps, stages)))
                except triton.runtime.errors.OutOfResources:
                    break
        return min(found)


PEER_TILES = {
    1: [(32, 4, 3), (32, 4, 4), (64, 4, 2), (64, 4, 3), (64, 8, 3)],
    2: [(32, 4, 3), (64, 4, 2), (64, 4, 3), (64, 8, 3)],
    3: [(32, 4, 3), (64, 4, 2), (64, 8, 2), (64, 8, 3), (64, 4, 3)],
    4: [(32, 4, 3), (64, 4, 2), (64, 8, 2), (64, 8, 3), (64, 4, 3)],
}


def warm(job):
    """Compile in a process of its own: many at a time."""
    try:
        torch.cuda.set_device(0)
        if job[0] == "ours":
            _, tuned, name, head_dim, rows = job
            variant = cuda.variant_for(tuned, FORMATS[name], head_dim, rows)
            major, minor = torch.cuda.get_device_capability()
            kernel.cubin_of(variant, major * 10 + minor)
        else:
            _, queries, n, warps, stages = job
            k = torch.zeros(1, BF16_BLOCK, HK, D, device=GPU, dtype=torch.bfloat16)
            q = torch.zeros(queries, HK * G, D, device=GPU, dtype=torch.bfloat16)
            table = torch.zeros(1, 29, dtype=torch.int32, device=GPU)
            lengths = torch.full((1,), 16, dtype=torch.int32, device=GPU)
            bf16.attend(q, k, k, table, lengths, queries, SCALE, q.clone(), 2, n, warps, stages)
        torch.cuda.synchronize()
        return None
    except Exception as error:
        return f"{job}: {type(error).__name__} {str(error)[:200]}"


def warm_all(jobs):
    began = time.time()
    with multiprocessing.get_context("spawn").Pool(14) as pool:
        for failed in pool.imap_unordered(warm, jobs):
            if failed:
                print(failed, flush=True)
    print(f"compiled {len(jobs)} in {time.time() - began:.0f} s", flush=True)


def ours(tuned, rows, names=tuple(FORMATS)):
    return [("ours", tuned, n, D, r) for n in names for r in rows]


def sweep(processors):
    name = "turboquant_4bit_nc"
    tiles = [(warps, blocks) for warps, blocks in ((8, 1), (8, 2), (4, 2), (4, 3), (4, 4))]
    entries = [Tuned(warps, blocks, True) for warps, blocks in tiles]
    warm_all([job for tuned in entries for job in ours(tuned, (16, 32, 48, 64), (name,))])
    rows = []
    for context, batch in [(64, 1), (16384, 1), (131072, 1), (32768, 16)]:
        cached = Ours(name, context, batch)
        for queries in (1, 2, 3, 4):
            mine = []
            for tuned in entries:
                t = cached.time(queries, tuned, processors)
                mine.append({"context": context, "batch": batch, "queries": queries, "us": t, **vars(tuned)})
            mine.sort(key=lambda row: row["us"])
            print(context, batch, queries, [(round(r["us"], 1), r["warps"], r["blocks"]) for r in mine])
            rows += mine
        del cached
        torch.cuda.empty_cache()
    return rows


BEST_PEER = {1: [(64, 4, 3), (64, 4, 2)], 2: [(64, 4, 2)], 3: [(32, 4, 3), (64, 4, 2)], 4: [(32, 4, 3), (64, 4, 2)]}


def bench(tuned, processors):
    PEER_TILES.update(BEST_PEER)
    name = "turboquant_4bit_nc"
    jobs = ours(tuned, (16, 32, 48, 64))
    jobs += [("peer", q, *tile) for q, found in PEER_TILES.items() for tile in found]
    warm_all(jobs)
    x = torch.empty(1 << 31, dtype=torch.uint8, device=GPU).random_()
    read = 2**31 / replays([lambda: torch.sum(x.view(torch.int64))] * 2) / 1e3
    print("read", round(read), "GB/s", flush=True)
    x = None
    rows = [{"read": read}]
    alone = [(context, 1) for context in (64, 8192, 16384, 32768, 65536, 131072, 262144)]
    for context, batch in (*alone, (8192, 4), (32768, 4), (131072, 4), (8192, 16), (32768, 16)):
        cached = Ours(name, context, batch)
        mine = {q: cached.time(q, tuned, processors) for q in (1, 2, 3, 4)}
        size = cached.bytes
        del cached
        peer = Peer(context, batch)
        for q in mine:
            t, how = peer.best(q, processors)
            case = {"format": name, "context": context, "batch": batch, "queries": q}
            bytes_ = {"bytes": size, "bf16_bytes": peer.bytes}
            rows.append({**case, "us": mine[q], "bf16_us": t, "how": how, **bytes_})
            print(*case.values(), round(mine[q], 1), round(t, 1), round(t / mine[q], 2), flush=True)
        del peer
        torch.cuda.empty_cache()
    for n in FORMATS:
        cached = Ours(n, 131072, 1)
        for q in (1, 3, 8):
            t = cached.time(q, tuned, processors)
            rows.append({"format": n, "context": 131072, "batch": 1, "queries": q, "us": t, "bytes": cached.bytes})
            print(n, q, round(t, 1), flush=True)
    cached = Ours(name, 131072, 1)
    for limit in (48,):
        for q in (1, 2, 3):
            t = cached.time(q, tuned, limit)
            rows.append({"processors": limit, "queries": q, "us": t, "bytes": cached.bytes})
            print("programs for", limit, "q", q, round(t, 1), round(cached.bytes / t / 1e3), "GB/s", flush=True)
    chunk = 2048
    q = torch.randn(chunk, HK * G, D, device=GPU, dtype=torch.bfloat16)
    out = torch.empty_like(q)
    starts = torch.arange(0, chunk + 1, 4, dtype=torch.int32, device=GPU)
    lengths = torch.arange(131072 - chunk + 4, 131072 + 1, 4, dtype=torch.int32, device=GPU)
    owners = torch.zeros(chunk // 4, dtype=torch.int32, device=GPU)
    table = cached.tables[0]
    t = replays(
        [lambda: cuda.attend(q, cached.cache, table, lengths, starts, 4, SCALE, out, tuned, processors, owners)], 3
    )
    k, v = (torch.randn(1, HK, 131072, D, device=GPU, dtype=torch.bfloat16) for _ in range(2))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    p = replays([lambda: sdpa(q.transpose(0, 1)[None], k, v, enable_gqa=True)], 3)
    rows.append({"prefill": chunk, "us": t, "bf16_us": p})
    print("prefill 2048 over 128K", round(t), "sdpa bf16", round(p), round(p / t, 2), flush=True)
    counts = (1, 4, 48, 2048, 8192)
    new_k, new_v = (torch.randn(counts[-1], HK, D, device=GPU, dtype=torch.bfloat16) for _ in range(2))
    slots = torch.arange(counts[-1], device=GPU)
    for n in counts:
        t = replays([lambda n=n: cuda.store_tokens(new_k[:n], new_v[:n], cached.cache, slots[:n])] * 4)
        rows.append({"store": n, "us": t})
        print("store", n, round(t, 1), flush=True)
    return rows


def main():
    what, file = sys.argv[1:3]
    properties = torch.cuda.get_device_properties(0)
    processors = properties.multi_processor_count
    print(properties.name, processors, torch.__version__, triton.__version__, flush=True)
    tuned = tuned_for(properties.major * 10 + properties.minor)
    found = {"sweep": lambda: sweep(processors), "bench": lambda: bench(tuned, processors)}[what]()
    with open(file, "w") as out:
        json.dump(found, out, indent=1)


if __name__ == "__main__":
    main()
