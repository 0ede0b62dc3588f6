"""Cached tokens as plain keys and values again, a bounded number at a time: what prefill over a long history reads.

They stay rotated, and so are the queries for them (`turn`); `fold` turns back what was found and adds it to the rest.
All of it is float16, whatever the queries are: 11 bits hold a code times a norm, 8 would not.
"""

from __future__ import annotations

import torch

from sparkpin_turboquant import driver
from sparkpin_turboquant.cuda import Cache, access_of, at_of, check_rows, signs
from sparkpin_turboquant.formats import GROUP
from sparkpin_turboquant.kernel import Expand, Fold, Turn


def expand_tokens(
    key: torch.Tensor, value: torch.Tensor, cache_: Cache, row: torch.Tensor, first: int, count: int
) -> None:
    """Tokens of one sequence -> ``key``, ``value`` ``[heads, >= count, D]`` float16, in both as far apart.

    row: the sequence's blocks, int32.
    """
    access = access_of(cache_, torch.float16)
    args = Expand(
        cache=cache_.data.data_ptr(),
        row=row.data_ptr(),
        key=key.data_ptr(),
        value=value.data_ptr(),
        stride=key.stride(0),
        at=at_of(cache_),
        first=first,
        count=count,
        block_groups=cache_.block_size // GROUP,
    )
    on_gpu = driver.loaded(access, key.device.index)
    on_gpu.launch(access.expand(first, count, cache_.heads), args, driver.stream_of(key.device))


def turn(query: torch.Tensor, cache_: Cache) -> torch.Tensor:
    """``[T, H, D]`` -> rotated, float16. Rows may be strided."""
    check_rows(query)
    tokens, heads, head_dim = query.shape
    access = access_of(cache_, query.dtype)
    out = torch.empty(query.shape, dtype=torch.float16, device=query.device)
    args = Turn(
        query=query.data_ptr(),
        out=out.data_ptr(),
        signs=signs(head_dim, query.device).data_ptr(),
        stride=query.stride(0),
        tokens=tokens,
        heads=heads,
        bfloat=query.dtype == torch.bfloat16,
    )
    on_gpu = driver.loaded(access, query.device.index)
    on_gpu.launch(access.by_rows("turn", tokens * heads), args, driver.stream_of(query.device))
    return out


def fold_into(
    out: torch.Tensor, logs: torch.Tensor, part: torch.Tensor, part_logs: torch.Tensor, cache_: Cache
) -> None:
    """``out`` ``[T, H, D]`` and ``logs`` ``[H, T]`` float32 are changed in place.

    part: ``[T, H, D]`` float16, rotated. part_logs: ``[H, T]`` float32, infinite where a query saw nothing.
    """
    check_rows(out)
    tokens, heads, head_dim = out.shape
    access = access_of(cache_, out.dtype)
    args = Fold(
        out=out.data_ptr(),
        logs=logs.data_ptr(),
        part=part.data_ptr(),
        part_logs=part_logs.data_ptr(),
        signs=signs(head_dim, out.device).data_ptr(),
        stride=out.stride(0),
        logs_stride=logs.stride(0),
        part_logs_stride=part_logs.stride(0),
        tokens=tokens,
        heads=heads,
        bfloat=out.dtype == torch.bfloat16,
    )
    on_gpu = driver.loaded(access, out.device.index)
    on_gpu.launch(access.by_rows("fold", tokens * heads), args, driver.stream_of(out.device))
