"""A drafter's head in 4 bits beside the INT8 head and cuBLAS BF16, in one run on one GPU.

    python mods/int8-lm-head/benchmarks/draft_head.py --out draft_head.json

Needs 8 GB of GPU memory. Every time is the median of replays of a CUDA graph over three copies of the weights; "of read
bandwidth" is the weights' bytes over the time, as a share of what the fastest kernel that only reads gave.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import triton
from head import COPIES, K, V, side_by_side
from sparkpin_int8_lm_head import int4
from sparkpin_int8_lm_head.cuda import int4_linear, int8_linear, rehearse_int4
from sparkpin_int8_lm_head.layout import lay_out
from sparkpin_int8_lm_head.quantise import quantise_head, slices
from sparkpin_int8_lm_head.tuned import tuned_for
from timing import read_bandwidth

TOKENS = (1, 2, 3, 8, 16, 24, 48)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out_file = parser.parse_args().out
    major, minor = torch.cuda.get_device_capability()
    tuned, tuned_int4 = (tuned_for(10 * major + minor, bits) for bits in (8, 4))
    torch.manual_seed(0)
    weight = torch.randn(V, K, device="cuda", dtype=torch.bfloat16).mul_(0.02)
    made = quantise_head(weight, lay_out(V, K, weight.device))
    torch.cuda.synchronize()
    start = time.perf_counter()
    packed, row_scale = int4.memory(V, K, weight.device), torch.empty(V, device="cuda")
    for part in slices(V):
        numbers, row_scale[part] = int4.quantise(made.q[part], made.row_scale[part])
        packed[part] = int4.pack(numbers)
    torch.cuda.synchronize()
    packing_s = time.perf_counter() - start
    rehearse_int4(packed, row_scale, made.column_scale, torch.bfloat16, tuned_int4)

    def copies(tensor: torch.Tensor, empty: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
        return [tensor, *(empty().copy_(tensor) for _ in range(COPIES - 1))]

    dense = copies(weight, lambda: torch.empty_like(weight))
    int8 = copies(made.q, lambda: lay_out(V, K, weight.device))
    in_4_bits = copies(packed, lambda: int4.memory(V, K, weight.device))
    bandwidth = read_bandwidth([head.contiguous().view(-1).view(torch.int32) for head in int8])
    rows = []
    print("| tokens | cuBLAS BF16, us | of read bandwidth | INT8, us | of it | 4 bits, us | of it | INT8 / 4 bits |")
    print("|---|---|---|---|---|---|---|---|")
    for tokens in TOKENS:
        x = torch.randn(tokens, K, device="cuda").bfloat16()
        narrow = torch.empty(tokens, V, device="cuda", dtype=torch.bfloat16)
        wide = torch.empty(tokens, V, device="cuda")
        times = side_by_side({
            "cublas": [partial(torch.mm, x, w.T, out=narrow) for w in dense],
            "int8": [
                partial(int8_linear, x, q, made.row_scale, made.column_scale, None, tuned, wide) for q in int8
            ],
            "int4": [
                partial(int4_linear, x, q, row_scale, made.column_scale, tuned_int4, wide) for q in in_4_bits
            ],
        })  # fmt: skip
        best = int8_linear(x, made.q, made.row_scale, made.column_scale, None, tuned).argmax(1)
        same = float(
            (int4_linear(x, packed, row_scale, made.column_scale, tuned_int4).argmax(1) == best).float().mean()
        )
        size = {"cublas": weight.nbytes, "int8": made.q.numel(), "int4": packed.numel()}
        share = {name: size[name] / took / 1e3 / bandwidth for name, took in times.items()}
        cells = " | ".join(f"{times[name]:.0f} | {share[name]:.2f}" for name in times)
        print(f"| {tokens} | {cells} | {times['int8'] / times['int4']:.2f} |", flush=True)
        rows.append({"tokens": tokens, **times, "share": share, "same_best": same})
    result = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "V": V,
        "K": K,
        "read_GBps": bandwidth,
        "packing_s": packing_s,
        "times_us": rows,
    }
    out_file.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "times_us"}))


if __name__ == "__main__":
    main()
