"""Time tile sizes on the GPU at hand: where the entries of tuned.json for a measured architecture come from.

    python mods/int8-lm-head/benchmarks/sweep.py [--tokens 128] [--best 5] [--bits 4]

Prints the best entries for each tile of tokens, and what they took.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial

import torch
from sparkpin_int8_lm_head.ahead import compile_head, compile_int4
from sparkpin_int8_lm_head.cuda import int4_linear, int8_linear
from sparkpin_int8_lm_head.layout import lay_out
from sparkpin_int8_lm_head.tuned import Tuned
from sparkpin_modkit.ahead import AbsentGpu
from timing import microseconds
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

V, K = 248_320, 3072
SIZES = (8, 16, 32, 64, 128)
SHARED_MEMORY = {90: 232_448}
OTHERS = 101_376


def candidates(size: int, architecture: int, bits: int) -> Iterator[Tuned]:
    shared_memory = SHARED_MEMORY.get(architecture, OTHERS)
    for block_v, block_k, warps, stages in itertools.product(
        (64, 128, 256), (64, 128, 256, 512), (4, 8), (2, 3, 4, 5, 6)
    ):
        stage = (block_v + 2 * size * (8 // bits)) * block_k
        registers = block_v * 2 * size // (32 * warps)
        if stage * stages <= shared_memory and block_v * block_k >= 8192 and registers <= 128 and block_v >= 16 * warps:
            yield Tuned(size, block_v, block_k, warps, stages, bits=bits)


def compile_for(architecture: int, tuned: Tuned) -> None:
    driver.set_active(AbsentGpu(GPUTarget("cuda", architecture, 32)))
    if tuned.bits == 4:
        compile_int4(tuned)
    else:
        compile_head(tuned, torch.bfloat16, False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, action="append", help="measure with so many (default: the tile's)")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--best", type=int, default=5)
    parser.add_argument("--bits", type=int, choices=(4, 8), default=8)
    options = parser.parse_args()
    major, minor = torch.cuda.get_device_capability()
    architecture = 10 * major + minor
    found = [c for size in options.sizes for c in candidates(size, architecture, options.bits)]
    with ProcessPoolExecutor() as pool:
        list(pool.map(partial(compile_for, architecture), found))
    heads = []
    for _ in range(3):
        heads.append(lay_out(V, K * options.bits // 8, torch.device("cuda")))
        heads[-1].random_(-127, 128)
    row_scale = torch.ones(V, device="cuda", dtype=torch.float32 if options.bits == 4 else torch.bfloat16)
    for size in options.sizes:
        for tokens in options.tokens or [size]:
            x = torch.randn(tokens, K, device="cuda").bfloat16()
            out = torch.empty(tokens, V, device="cuda")
            times = []
            for tuned in (entry for entry in found if entry.block_b == size):
                table = {tuned.block_b: tuned}
                if options.bits == 4:
                    calls = [partial(int4_linear, x, q, row_scale, None, table, out) for q in heads]
                else:
                    calls = [partial(int8_linear, x, q, row_scale, None, None, table, out) for q in heads]
                times.append((microseconds(calls * 2, replays=7), json.dumps(asdict(tuned))))
            for took, entry in sorted(times)[: options.best]:
                print(f"{tokens} tokens: {took:.1f} us  {entry}", flush=True)


if __name__ == "__main__":
    main()
