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
    key: torch.Tensor,
    value: torch.Tensor,
    cache_: Cache,
    row: torch.Tensor,
    first: int,
    count: int,
    overlap: bool = False,
) -> None:
    """Tokens of one sequence -> ``key``, ``value`` ``[heads, >= count, D]`` float16, in both as far apart.

    row: the sequence's blocks, int32. overlap: it may start while `turn_new` or another of these runs; it ends after
    them.
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
        overlap=overlap,
    )
    on_gpu = driver.loaded(access, key.device.index)
    on_gpu.launch(access.expand(first, count, cache_.heads), args, driver.stream_of(key.device), overlap)


def turn(query: torch.Tensor, cache_: Cache) -> torch.Tensor:
    """``[T, H, D]`` -> rotated, float16. Rows may be strided."""
    return _turned(query, cache_)


def turn_new(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache_: Cache,
    room: tuple[torch.Tensor, torch.Tensor],
    starts: torch.Tensor,
    key_starts: torch.Tensor,
) -> torch.Tensor:
    """`turn`, and ``key``, ``value`` ``[T, Hkv, D]`` of the same tokens rotated, too, in float16, into `room`.

    room: of keys and of values, each ``[Hkv, keys, D]`` float16, in both as far apart. starts, key_starts: ``[R + 1]``
    int32, where a request's queries start, and its keys in `room`; the last of these are the new tokens'.
    """
    check_rows(key, value)
    more = {
        "key": key.data_ptr(),
        "value": value.data_ptr(),
        "new_key": room[0].data_ptr(),
        "new_value": room[1].data_ptr(),
        "starts": starts.data_ptr(),
        "key_starts": key_starts.data_ptr(),
        "key_stride": key.stride(0),
        "value_stride": value.stride(0),
        "new_stride": room[0].stride(0),
        "kv_heads": key.shape[1],
        "requests": starts.shape[0] - 1,
    }
    return _turned(query, cache_, **more)


def _turned(query: torch.Tensor, cache_: Cache, **more: int) -> torch.Tensor:
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
        **more,
    )
    on_gpu = driver.loaded(access, query.device.index)
    rows = tokens * (heads + 2 * more.get("kv_heads", 0))
    on_gpu.launch(access.by_rows("turn", rows), args, driver.stream_of(query.device))
    return out


def fold_into(
    out: torch.Tensor, logs: torch.Tensor, part: torch.Tensor, part_logs: torch.Tensor, cache_: Cache
) -> None:
    """``out`` ``[T, H, D]`` and ``logs`` ``[H, T]`` float32 are changed in place.

    part: ``[T, H, D]`` float16, rotated. part_logs: ``[H, T]`` float32, infinite where a query saw nothing.
    """
    strides = {"logs_stride": logs.stride(0), "part_logs_stride": part_logs.stride(0)}
    _folded(out, part, cache_, False, logs=logs.data_ptr(), part_logs=part_logs.data_ptr(), **strides)


def turn_back(part: torch.Tensor, out: torch.Tensor, cache_: Cache, overlap: bool) -> None:
    """``part`` ``[T, H, D]`` float16, rotated -> ``out``, of the model's type. Rows of `out` may be strided.

    overlap: the launch may come before the kernel before it has ended, see `driver`.
    """
    _folded(out, part, cache_, overlap)


def _folded(out: torch.Tensor, part: torch.Tensor, cache_: Cache, overlap: bool, **more: int) -> None:
    check_rows(out)
    if part.shape != out.shape or not part.is_contiguous() or part.dtype != torch.float16:
        raise ValueError(
            f"turboquant: a part {tuple(part.shape)} of {part.dtype}, strides {part.stride()}; expected "
            f"{tuple(out.shape)} of float16, one number after another"
        )
    tokens, heads, head_dim = out.shape
    access = access_of(cache_, out.dtype)
    args = Fold(
        out=out.data_ptr(),
        part=part.data_ptr(),
        signs=signs(head_dim, out.device).data_ptr(),
        stride=out.stride(0),
        tokens=tokens,
        heads=heads,
        bfloat=out.dtype == torch.bfloat16,
        **more,
    )
    on_gpu = driver.loaded(access, out.device.index)
    on_gpu.launch(access.by_rows("fold", tokens * heads), args, driver.stream_of(out.device), overlap)
