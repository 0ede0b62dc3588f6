"""The INT8 head and its rows in 4 bits beside cuBLAS BF16, in one run on one GPU.

    python mods/int8-lm-head/benchmarks/head.py --out head.json

Needs 20 GB of GPU memory. Every time is the median of replays of a CUDA graph over three copies of the weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from sparkpin_int8_lm_head import int4
from sparkpin_int8_lm_head.cuda import int4_linear, int8_linear, rehearse, rehearse_int4
from sparkpin_int8_lm_head.layout import lay_out
from sparkpin_int8_lm_head.quantise import quantise_head, slices
from sparkpin_int8_lm_head.tuned import tuned_for
from timing import microseconds, read_bandwidth

V, K = 248_320, 3072
TOKENS = (1, 2, 3, 4, 8, 16, 24, 32, 40, 48, 64, 96, 128, 136, 160, 192, 224, 256, 384, 512, 1024)
COPIES = 3
ROUNDS = 6
PAUSE = 0.04


def side_by_side(contenders: dict[str, list[Callable[[], object]]]) -> dict[str, float]:
    """Median times, each contender's turns spread over the same seconds.

    A GPU under load lowers its clock, and keeps it low for a while: each turn begins after a pause, as a head's short
    work does between layers that wait for memory, and the order changes from round to round.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for turn in range(ROUNDS):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            torch.cuda.synchronize()
            time.sleep(PAUSE)
            times[name].append(microseconds(contenders[name] * 2, replays=3))
    return {name: statistics.median(found) for name, found in times.items()}


def multiply(x: torch.Tensor, w: torch.Tensor, narrow: torch.Tensor, wide: torch.Tensor) -> None:
    """BF16's logits, made float32 as vLLM does for a sampler."""
    torch.mm(x, w.T, out=narrow)
    wide.copy_(narrow)


def int8_and_copy(wide: torch.Tensor, other: torch.Tensor, x: torch.Tensor, q: torch.Tensor, *arguments: Any) -> None:
    """INT8's float32 logits, and the float32 copy that vLLM's newer runner makes even of those."""
    int8_linear(x, q, *arguments, wide)
    other.copy_(wide)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out_file = parser.parse_args().out
    major, minor = torch.cuda.get_device_capability()
    tuned, tuned_int4 = (tuned_for(10 * major + minor, bits) for bits in (8, 4))
    torch.manual_seed(0)
    weight = torch.randn(V, K, device="cuda").mul_(0.02)
    weight[:, torch.randperm(K)[:8]] *= 5
    weight = weight.bfloat16()
    codes = lay_out(V, K, weight.device)
    torch.cuda.synchronize()
    start = time.perf_counter()
    made = quantise_head(weight, codes)
    torch.cuda.synchronize()
    quantised = time.perf_counter() - start
    start = time.perf_counter()
    rehearse(made.q, made.row_scale, made.column_scale, None, torch.bfloat16, tuned)
    torch.cuda.synchronize()
    rehearsed = time.perf_counter() - start
    packed, row_scale = int4.memory(V, K, weight.device), torch.empty(V, device="cuda")
    for part in slices(V):
        numbers, row_scale[part] = int4.quantise(made.q[part], made.row_scale[part])
        packed[part] = int4.pack(numbers)
    rehearse_int4(packed, row_scale, made.column_scale, torch.bfloat16, tuned_int4)
    heads = [made.q, *(lay_out(V, K, weight.device).copy_(made.q) for _ in range(COPIES - 1))]
    in_4_bits = [packed, *(int4.memory(V, K, weight.device).copy_(packed) for _ in range(COPIES - 1))]
    dense = [weight, *(weight.clone() for _ in range(COPIES - 1))]
    bandwidth = read_bandwidth([head.view(-1).view(torch.int32) for head in heads])
    inputs = {tokens: torch.randn(tokens, K, device="cuda").bfloat16() for tokens in TOKENS}
    rows = []
    for tokens in TOKENS:
        x = inputs[tokens]
        narrow = torch.empty(tokens, V, device="cuda", dtype=torch.bfloat16)
        wide, other = torch.empty(2, tokens, V, device="cuda")
        arguments = (made.row_scale, made.column_scale, None, tuned)
        contenders = {
            "int8": [partial(int8_linear, x, q, *arguments, wide) for q in heads],
            "int8_bf16_logits": [partial(int8_linear, x, q, *arguments, narrow) for q in heads],
            "int4": [partial(int4_linear, x, q, row_scale, made.column_scale, tuned_int4, wide) for q in in_4_bits],
            "cublas": [partial(torch.mm, x, w.T, out=narrow) for w in dense],
            "cublas_float32": [partial(multiply, x, w, narrow, wide) for w in dense],
            "int8_copied": [partial(int8_and_copy, wide, other, x, q, *arguments) for q in heads],
        }
        rows.append({"tokens": tokens, **side_by_side(contenders)})
        print(json.dumps({name: round(value, 1) for name, value in rows[-1].items()}), flush=True)
    result = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "V": V,
        "K": K,
        "read_GBps": bandwidth,
        "quantise_s": quantised,
        "rehearse_s": rehearsed,
        "alpha": made.alpha,
        "outlier_columns": made.outlier_columns,
        "weight_error": made.error,
        "times_us": rows,
    }
    out_file.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "times_us"}))


if __name__ == "__main__":
    main()
