from __future__ import annotations

import math

import torch


def flash(
    scale: float,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    most_queries: int,
    most_keys: int,
    causal: bool,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands for FlashAttention, which needs a GPU: the same contract, in float32."""
    found = torch.empty_like(query) if out is None else out
    logs = torch.full((query.shape[1], query.shape[0]), math.inf)
    group = query.shape[1] // key.shape[1]
    for a, b, c, d in zip(query_starts, query_starts[1:], key_starts, key_starts[1:], strict=False):
        assert b - a <= most_queries and d - c <= most_keys
        if a == b or c == d:
            found[a:b] = 0
            continue
        scores = torch.einsum("qhd,shd->hqs", query[a:b].float(), key[c:d].float().repeat_interleave(group, 1)) * scale
        if causal:
            hidden = torch.arange(int(d - c))[None] > torch.arange(int(b - a))[:, None] + int((d - c) - (b - a))
            scores = scores.masked_fill(hidden, -math.inf)
        logs[:, a:b] = scores.logsumexp(-1)
        values = value[c:d].float().repeat_interleave(group, 1)
        found[a:b] = torch.einsum("hqs,shd->qhd", scores.softmax(-1), values).to(found.dtype)
    return found, logs
