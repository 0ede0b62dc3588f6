"""How far the INT8 head's logits are from BF16's and float32's, on synthetic heads with and without outlier columns.

    python mods/int8-lm-head/benchmarks/numerics.py --out numerics.json

Reference: the same 16-bit weights in float32 arithmetic. "random": hidden states that favour no token, so that the
two best are often a rounding apart; "aimed": each favours one token, by as much as makes it likely or one of many.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from sparkpin_int8_lm_head.cuda import int8_linear
from sparkpin_int8_lm_head.layout import lay_out
from sparkpin_int8_lm_head.quantise import quantise_head
from sparkpin_int8_lm_head.tuned import tuned_for

V, K, TOKENS, PART = 248_320, 3072, 4096, 256


def hidden(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """``[TOKENS, K]`` bfloat16, with logits of standard deviation about 2."""
    x = torch.randn(TOKENS, K, device="cuda")
    x *= 2 / (x[:64] @ weight[:4096].float().T).std()
    if kind == "aimed":
        targets = weight[torch.randint(V, (TOKENS,), device="cuda")].float()
        wanted = torch.empty(TOKENS, 1, device="cuda").uniform_(7, 17)
        x += targets * (wanted - (x * targets).sum(1, keepdim=True)) / targets.square().sum(1, keepdim=True)
    return x.bfloat16()


def compare(logits: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Sums over tokens: same first, share of the same twenty, KL divergence."""
    first = (logits.argmax(1) == exact.argmax(1)).double()
    best, wanted = logits.topk(20).indices, exact.topk(20).indices
    twenty = (best[:, :, None] == wanted[:, None, :]).any(2).double().mean(1)
    p, q = exact.double().log_softmax(1), logits.double().log_softmax(1)
    return torch.stack([first.sum(), twenty.sum(), (p.exp() * (p - q)).sum()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out_file = parser.parse_args().out
    torch.backends.cuda.matmul.allow_tf32 = False
    major, minor = torch.cuda.get_device_capability()
    tuned = tuned_for(10 * major + minor)
    result = []
    for outliers in (0, 8):
        torch.manual_seed(outliers)
        weight = torch.randn(V, K, device="cuda") * 0.02
        weight[:, torch.randperm(K)[:outliers]] *= 5
        weight = weight.bfloat16()
        made = quantise_head(weight, lay_out(V, K, weight.device))
        rows_only = quantise_rows_only(weight)
        for kind in ("random", "aimed"):
            x = hidden(weight, kind)
            sums = {name: torch.zeros(3, dtype=torch.float64, device="cuda") for name in NAMES}
            for start in range(0, TOKENS, PART):
                part = x[start : start + PART]
                exact = part.float() @ weight.float().T
                wide = torch.empty_like(exact)
                int8_linear(part, made.q, made.row_scale, made.column_scale, None, tuned, wide)
                sums["bf16"] += compare((part @ weight.T).float(), exact)
                sums["int8"] += compare(wide.bfloat16().float(), exact)
                sums["int8, float32 logits"] += compare(wide, exact)
                int8_linear(part, *rows_only, None, None, tuned, wide)
                sums["int8 without column scales, float32 logits"] += compare(wide, exact)
            for name, values in sums.items():
                first, twenty, divergence = (values / TOKENS).tolist()
                result.append(
                    {
                        "outliers": outliers,
                        "hidden": kind,
                        "head": name,
                        "top1": first,
                        "top20": twenty,
                        "kl": divergence,
                    }
                )
                print(json.dumps(result[-1]), flush=True)
    out_file.write_text(json.dumps(result, indent=1) + "\n")


NAMES = ("bf16", "int8", "int8, float32 logits", "int8 without column scales, float32 logits")


def quantise_rows_only(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from sparkpin_int8_lm_head import naive

    q = lay_out(*weight.shape, weight.device)
    scales = []
    ones = torch.ones(weight.shape[1], device=weight.device)
    for start in range(0, weight.shape[0], 4096):
        codes, scale = naive.quantise(weight[start : start + 4096], ones, weight.dtype)
        q[start : start + 4096] = codes
        scales.append(scale)
    return q, torch.cat(scales).bfloat16()


if __name__ == "__main__":
    main()
