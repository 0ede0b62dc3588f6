"""How far the INT8 head and BF16 are from trained weights, through naive.py, on any machine."""

from __future__ import annotations

import json

import torch
from sparkpin_int8_lm_head import naive
from sparkpin_int8_lm_head.quantise import quantise_head


def compare(logits: torch.Tensor, exact: torch.Tensor) -> dict[str, float]:
    best, wanted = logits.topk(20).indices, exact.topk(20).indices
    p, q = exact.double().log_softmax(1), logits.double().log_softmax(1)
    return {
        "top1": float((logits.argmax(1) == exact.argmax(1)).double().mean()),
        "top20": float((best[:, :, None] == wanted[:, None, :]).any(2).double().mean()),
        "kl": float((p.exp() * (p - q)).sum(1).mean()),
    }


def report(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> None:
    """Hidden states ``[B, K]`` bfloat16, weight ``[V, K]`` and bias ``[V]`` float32.

    Against "bf16 weights", the weights are in bfloat16, as a checkpoint has them, and the logits exact otherwise.
    """
    dense = weight.bfloat16()
    made = quantise_head(dense)
    digits, scale = naive.digits(x, made.column_scale.float())
    fixed = scale[:, None] * (256 * digits[:, 0].float() + digits[:, 1].float())
    int8 = (fixed @ made.q.float().T) * made.row_scale.float() + bias
    trained, sixteen = x.float() @ weight.T + bias, x.float() @ dense.float().T + bias
    print(f"V={weight.shape[0]} K={weight.shape[1]} hidden states={x.shape[0]}")
    print(f"alpha={made.alpha} outlier columns={made.outlier_columns} weight error={made.error:.5f}")
    print(f"different tokens chosen: {len(set(trained.argmax(1).tolist()))}")
    heads = {"bf16": (x @ dense.T + bias.bfloat16()).float(), "int8, float32 logits": int8}
    for label, logits in heads.items():
        for name, exact in (("float32 weights", trained), ("bf16 weights", sixteen)):
            print(json.dumps({"head": label, "against": name, **compare(logits, exact)}))
