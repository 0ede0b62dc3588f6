"""Times on a GPU: medians of replayed CUDA graphs, over several copies of the weights so that none is in the cache."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl


def microseconds(calls: Sequence[Callable[[], object]], replays: int = 15) -> float:
    """Median time of one of `calls`, which are captured in a graph one after the other."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


@triton.jit
def _read(source, out, N, BLOCK: tl.constexpr, UNROLL: tl.constexpr):
    first, step = tl.program_id(0), tl.num_programs(0)
    offsets = tl.arange(0, BLOCK)
    mixed = tl.zeros((BLOCK,), tl.int32)
    for block in tl.range(first, N // BLOCK, step, num_stages=1, loop_unroll_factor=UNROLL):
        mixed ^= tl.load(source + block.to(tl.int64) * BLOCK + offsets, eviction_policy="evict_first")
    tl.store(out + first * BLOCK + offsets, mixed)


def read_bandwidth(buffers: Sequence[torch.Tensor]) -> float:
    """GB/s at which a kernel that only reads gets through int32 `buffers`, one launch each: the best of some shapes."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    best = 0.0
    for programs, block, unroll, warps in itertools.product((4, 8, 16), (1024, 2048), (4, 8), (4, 8)):
        grid = (processors * programs,)
        out = torch.empty(grid[0] * block, dtype=torch.int32, device="cuda")

        def read(buffer, grid=grid, out=out, block=block, unroll=unroll, warps=warps):
            _read[grid](buffer, out, buffer.numel(), BLOCK=block, UNROLL=unroll, num_warps=warps)

        took = microseconds([lambda b=b, read=read: read(b) for b in buffers] * 2, replays=5)
        best = max(best, buffers[0].nbytes / took / 1e3)
    return best
