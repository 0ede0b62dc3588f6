"""Correctness, a sweep of tiles, or the benchmark, on the GPU that is there. usage: python run.py check|sweep|bench
OUT.json"""

from __future__ import annotations

import json
import multiprocessing
import os
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


def ours(tuned, rows, names=tuple(FORMATS), head_dims=(D,)):
    return [("ours", tuned, n, d, r) for n in names for d in head_dims for r in rows]


CHECKED = tuple(map(int, os.environ.get("CHECKED", "1 127 128 129 1024 4607 4608 4609 32768 262144").split()))


def error(a, b):
    return float((a.float() - b.float()).norm() / b.float().norm())


def shapes(name, head_dim, heads, group, block, work, tuned, processors, owned=False):
    """The error of sequences of (cached tokens, queries), or of one request's queries in pieces if `owned`."""
    format = FORMATS[name]
    slot = format.slot_bytes(head_dim) + 2
    per = [-(-length // block) for length, _ in work]
    size = heads * block * slot
    data = torch.full((sum(per) + 1, size + 48), 0x7E, dtype=torch.uint8, device=GPU)
    cache = cuda.Cache(data, format, heads, head_dim, block, slot, size + 48)
    blocks = naive.Blocks(data[:, :size], format, heads, head_dim, block, slot)
    order = torch.randperm(sum(per) + 1, device=GPU).int()
    table = torch.zeros(len(work), max(per) + 3, dtype=torch.int32, device=GPU)
    slots = []
    for i, (length, _) in enumerate(work):
        table[i, : per[i]] = order[sum(per[:i]) : sum(per[: i + 1])]
        n = torch.arange(length, device=GPU)
        slots.append(table[i, n // block].long() * block + n % block)
        key, value = (torch.randn(length, heads, head_dim, device=GPU).bfloat16() for _ in range(2))
        key[length // 2 :] *= 6  # tops move
        cuda.store_tokens(key, value, cache, slots[-1])
    counts = [queries for _, queries in work]
    whole = [sum(counts[:i]) for i in range(len(counts) + 1)]
    # Rows of queries are a part of something wider, as vLLM's are.
    wide = torch.randn(whole[-1], heads * group + 2, head_dim, device=GPU).bfloat16()
    query, out = wide[:, : heads * group], torch.full_like(wide, torch.nan)[:, : heads * group]
    starts, lengths, owners = whole, [length for length, _ in work], None
    if owned:
        pieces = [(i, at) for i, many in enumerate(counts) for at in range(0, many, 4)]
        starts = [whole[i] + at for i, at in pieces] + [whole[-1]]
        lengths = [work[i][0] - counts[i] + min(at + 4, counts[i]) for i, at in pieces]
        owners = torch.tensor([i for i, _ in pieces], dtype=torch.int32, device=GPU)
    starts, lengths = (torch.tensor(x, dtype=torch.int32, device=GPU) for x in (starts, lengths))
    most = 4 if owned else max(counts)
    cuda.attend(query, cache, table, lengths, starts, most, head_dim**-0.5, out, tuned, processors, owners)
    found = []
    for i, many in enumerate(counts):
        mine = slice(whole[i], whole[i + 1])
        if many:
            found.append(error(out[mine], naive.attend(query[mine], blocks, slots[i], head_dim**-0.5)))
    return max(found) if bool(out.isfinite().all()) else 9.0


def check_shapes(tuned, processors):
    mixed = [(1, 1), (300, 1), (0, 0), (17, 2), (9300, 3), (16, 3), (257, 1)]
    cases = [
        (head_dim, heads, group, block, work, False)
        for head_dim in (64, 128, 256)
        for heads, group, block, work in (
            (2, 16, 16, mixed),
            (1, 8, 4624, mixed),
            (8, 4, 48, [(1000 + 37 * i, 1) for i in range(100)]),
            (2, 6, 272, [(5000, 8), (129, 5), (8, 8)]),
        )
    ]
    cases += [(d, 2, 16, b, [(700, 700), (5000, 37)], True) for d, b in ((256, 4608), (128, 16), (64, 32))]
    cases += [(256, 2, 16, 4608, [(40000, 8), (40000, q)], False) for q in range(1, 9)]
    cases += [(256, 1, 7, 32, [(3000, 12)], False), (256, 4, 1, 4608, [(70000, 1), (3, 1)], False)]
    rows = []
    for name in FORMATS:
        for case in cases:
            found = shapes(name, *case[:5], tuned, processors, case[5])
            rows.append({"format": name, "case": str(case), "error": found})
    worst = max(rows, key=lambda row: row["error"])
    print(len(rows), "other shapes, worst", worst, flush=True)
    return rows


def check(tuned, processors):
    """Against fp32 attention on the dequantised cache; and what the code costs against bfloat16's own error."""
    warm_all(ours(tuned, (16, 32, 48, 64), head_dims=(64, 128, 256)))
    rows = []
    for name, format in FORMATS.items():
        for context in CHECKED:
            for queries in (1, 2, 3, 4, 8):
                if queries > context or (context > 40000 and queries not in (1, 3)):
                    continue
                generator = torch.Generator(GPU).manual_seed(context * 10 + queries)
                slot = format.slot_bytes(D) + 2
                per = -(-context // BLOCK)
                data = torch.full((per + 1, HK * BLOCK * slot), 0x7E, dtype=torch.uint8, device=GPU)
                cache = cuda.Cache(data, format, HK, D, BLOCK, slot, HK * BLOCK * slot)
                table = torch.randperm(per + 1, device=GPU, generator=generator)[None, :per].int()
                n = torch.arange(context, device=GPU)
                slots = table[0, n // BLOCK].long() * BLOCK + n % BLOCK
                key, value = (torch.randn(context, HK, D, device=GPU, generator=generator).bfloat16() for _ in range(2))
                key[:, :, 5] *= 12
                cuda.store_tokens(key, value, cache, slots)
                q = torch.randn(queries, HK * G, D, device=GPU, generator=generator).bfloat16()
                needle = context // 2
                key_n = q[-1].float().view(HK, G, D).mean(1) * 4
                cuda.store_tokens(key_n[None].bfloat16(), value[needle : needle + 1], cache, slots[needle : needle + 1])
                key[needle] = key_n.bfloat16()
                out = torch.full_like(q, torch.nan)
                lengths = torch.tensor([context], dtype=torch.int32, device=GPU)
                starts = torch.tensor([0, queries], dtype=torch.int32, device=GPU)
                cuda.attend(q, cache, table, lengths, starts, queries, SCALE, out, tuned, processors)
                blocks = naive.Blocks(data, format, HK, D, BLOCK, slot)
                k, v = blocks.read_rotated(slots)
                wanted = cuda.rotation.unrotate(naive.attention(cuda.rotation.rotate(q), k, v, SCALE))
                exact = naive.attention(q, key, value, SCALE)
                logit = torch.einsum("hd,shd->hs", cuda.rotation.rotate(q[-1]).view(HK, G, D).mean(1), k)
                true = torch.einsum("hd,shd->hs", q[-1].float().view(HK, G, D).mean(1), key.float())
                margins = []
                for x in (logit, true):
                    other = x.clone()
                    other[:, needle] = -1e9
                    margins.append(float((x[:, needle] - other.amax(1)).min()) if context > 1 else 0.0)
                rows.append({
                    "format": name, "context": context, "queries": queries, "error": error(out, wanted),
                    "code_error": error(out, exact), "bf16_error": error(exact.bfloat16(), exact),
                    "margin": margins[0], "bf16_margin": margins[1], "finite": bool(out.isfinite().all()),
                })  # fmt: skip
                del k, v, wanted, exact, logit, true
    worst = max(rows, key=lambda row: row["error"] if row["finite"] else 9)
    print("worst", worst, flush=True)
    for name in FORMATS:
        mine = [row for row in rows if row["format"] == name]
        big = max(mine, key=lambda row: row["context"])
        print(name, "max error", max(row["error"] for row in mine), "256K:", big, flush=True)
    return rows + check_shapes(tuned, processors)


def sweep(processors):
    name = "turboquant_4bit_nc"
    tiles = [(warps, blocks) for warps, blocks in ((8, 1), (8, 2), (4, 2), (4, 3), (4, 4))]
    entries = [(Tuned(64, w, b, share, True),) for w, b in tiles for share in (1, 2)]
    warm_all([job for tuned in entries[::2] for job in ours(tuned, (16, 32, 48, 64), (name,))])
    rows = []
    for context, batch in [(64, 1), (16384, 1), (131072, 1), (32768, 16)]:
        cached = Ours(name, context, batch)
        for queries in (1, 2, 3, 4):
            mine = []
            for tuned in entries:
                t = cached.time(queries, tuned, processors)
                mine.append({"context": context, "batch": batch, "queries": queries, "us": t, **vars(tuned[0])})
            mine.sort(key=lambda row: row["us"])
            print(context, batch, queries, [(round(r["us"], 1), r["warps"], r["blocks"], r["share"]) for r in mine])
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
    cases = [(c, 1) for c in (64, 8192, 16384, 32768, 65536, 131072, 262144)] + [
        (8192, 4),
        (32768, 4),
        (131072, 4),
        (8192, 16),
        (32768, 16),
    ]
    for context, batch in cases:
        cached = Ours(name, context, batch)
        mine = {q: cached.time(q, tuned, processors) for q in (1, 2, 3, 4)}
        size = cached.bytes
        del cached
        peer = Peer(context, batch)
        for q in mine:
            t, how = peer.best(q, processors)
            rows.append(
                {
                    "format": name,
                    "context": context,
                    "batch": batch,
                    "queries": q,
                    "us": mine[q],
                    "bf16_us": t,
                    "how": how,
                    "bytes": size,
                    "bf16_bytes": peer.bytes,
                }
            )
            print(
                context,
                batch,
                q,
                round(mine[q], 1),
                round(t, 1),
                round(t / mine[q], 2),
                "GB/s",
                round(size / mine[q] / 1e3),
                round(peer.bytes / t / 1e3),
                flush=True,
            )
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
    found = {
        "check": lambda: check(tuned, processors),
        "sweep": lambda: sweep(processors),
        "bench": lambda: bench(tuned, processors),
    }[what]()
    with open(file, "w") as out:
        json.dump(found, out, indent=1)


if __name__ == "__main__":
    main()
