"""cache.cu's own code on a CPU against naive.py, at small and odd sizes."""

from __future__ import annotations

import pytest
import torch
from sparkpin_turboquant import cuda, history, naive
from sparkpin_turboquant.formats import FORMATS, Format
from sparkpin_turboquant.tuned import Tuned

ALL = list(FORMATS.values())


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def poisoned(format: Format, heads: int, head_dim: int, block_size: int, blocks: int = 9, spare: int = 2) -> cuda.Cache:
    """An empty cache whose norms are NaN and whose blocks lie further apart than they must."""
    slot = format.slot_bytes(head_dim) + spare
    size = heads * block_size * slot
    data = torch.full((blocks, size + 48), 0x7E, dtype=torch.uint8)
    return cuda.Cache(data, format, heads, head_dim, block_size, slot, size + 48)


def as_naive(cache: cuda.Cache) -> naive.Blocks:
    size = cache.heads * cache.block_size * cache.slot
    data = cache.data[:, :size]
    return naive.Blocks(data, cache.format, cache.heads, cache.head_dim, cache.block_size, cache.slot)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("format", ALL, ids=lambda f: f.name)
def test_stored_as_naive_stores(on_cpu: None, format: Format, head_dim: int) -> None:
    heads, block_size = 2, 32
    key, value = gaussian(7, heads, head_dim), gaussian(7, heads, head_dim, seed=1) * 30
    key[3], value[4] = 0, 1e7
    slots = torch.tensor([0, 31, 65, -1, 66, 200, 17])
    ours, wanted = (poisoned(format, heads, head_dim, block_size) for _ in range(2))
    cuda.store_tokens(key, value, ours, slots)
    kept = slots >= 0
    as_naive(wanted).write(key[kept], value[kept], slots[kept])
    # The order of float32 additions differs, so a component may fall to the other side of an edge, a norm to the next.
    differ = ours.data != wanted.data
    assert int(differ.sum()) <= 4
    got, expected = (as_naive(cache).read_rotated(slots[kept]) for cache in (ours, wanted))
    for a, b in zip(got, expected, strict=True):
        assert float((a - b).norm() / b.norm()) < 0.01


@pytest.mark.parametrize(
    ("format", "head_dim"), [*((format, 256) for format in ALL), (ALL[0], 64), (ALL[1], 64), (ALL[1], 128)]
)
def test_history_is_what_naive_reads(on_cpu: None, format: Format, head_dim: int) -> None:
    """Pieces that start and end anywhere; nothing beside them is written."""
    cache, row = poisoned(format, 3, head_dim, 32), torch.tensor([3, 0, 4], dtype=torch.int32)
    place = torch.arange(75)
    slots = row[place // 32].long() * 32 + place % 32
    key, value = gaussian(75, 3, head_dim), gaussian(75, 3, head_dim, seed=1)
    value[50] = 1e7
    as_naive(cache).write(key, value, slots)
    for first, count in ((0, 75), (20, 47), (74, 1), (31, 2)):
        found = torch.full((2, 3, count + 2, head_dim), torch.nan, dtype=torch.float16)
        history.expand_tokens(found[0, :, 1:], found[1, :, 1:], cache, row, first, count)
        assert bool(found[:, :, [0, -1]].isnan().all()) and bool(found[:, :, 1:-1].isfinite().all())
        same = place[first : first + count] != 50  # the other is finite, but no more like it
        for got, wanted in zip(found, as_naive(cache).read_rotated(slots[first : first + count]), strict=True):
            assert torch.allclose(got[:, 1:-1].float()[:, same], wanted[same].transpose(0, 1), rtol=5e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(64, torch.float32), (128, torch.float16), (256, torch.bfloat16), (256, torch.float16)]
)
def test_queries_are_turned_and_what_they_found_is_turned_back(on_cpu: None, head_dim: int, dtype: torch.dtype) -> None:
    cache = poisoned(ALL[1], 1, head_dim, 16)
    wide = gaussian(5, 7, head_dim).to(dtype)
    query = wide[:, 1:4]
    turned = history.turn(query, cache)
    assert torch.allclose(turned.float(), naive.rotate(query), rtol=2e-3, atol=2e-3)
    logs = gaussian(3, 9, seed=2)[:, 2:7]
    part_logs = gaussian(3, 6, seed=3)[:, :5]
    part_logs[1, 3] = torch.inf
    share = (part_logs - logs).sigmoid().nan_to_num().T.unsqueeze(-1)
    share[3, 1] = 0
    out = wide[:, 4:]
    wanted = out.float() * (1 - share) + query.float() * share
    wanted_logs = torch.where(part_logs.isinf(), logs, torch.logaddexp(logs, part_logs))
    history.fold_into(out, logs, turned, part_logs, cache)
    assert torch.allclose(out.float(), wanted, rtol=1e-2, atol=1e-2)
    assert torch.allclose(logs, wanted_logs, atol=1e-5)


@pytest.mark.parametrize(("head_dim", "dtype"), [(64, torch.float16), (256, torch.bfloat16)])
def test_new_tokens_go_behind_their_histories(on_cpu: None, head_dim: int, dtype: torch.dtype) -> None:
    """40 requests, some without queries, some without a history; nothing else is written."""
    cache = poisoned(ALL[1], 2, head_dim, 16)
    queries = [i % 3 for i in range(40)]
    histories = [5 * i % 4 for i in range(40)]
    starts = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0).int()
    key_starts = torch.tensor([0, *(a + b for a, b in zip(queries, histories, strict=True))]).cumsum(0).int()
    tokens, keys = int(starts[-1]), int(key_starts[-1])
    wide = gaussian(tokens, 8, head_dim).to(dtype)
    wide[1, 6] = 1e5 if dtype == torch.bfloat16 else 0
    query, key, value = wide[:, :3], wide[:, 3:5], wide[:, 5:7]
    room = torch.full((2, 2, keys + 3, head_dim), torch.nan, dtype=torch.float16)
    turned = history.turn_new(query, key, value, cache, (room[0], room[1]), starts, key_starts)
    assert torch.allclose(turned.float(), naive.rotate(query), rtol=2e-3, atol=2e-3)
    places = [int(key_starts[i + 1]) - n + j for i, n in enumerate(queries) for j in range(n)]
    for found, new in zip(room, (key, value), strict=True):
        wanted = naive.rotate(new).transpose(0, 1).clamp(-naive.FLOAT16_MAX, naive.FLOAT16_MAX)
        assert torch.allclose(found[:, places].float(), wanted, rtol=2e-3, atol=2e-3)
        assert int(found.isnan().all(-1).sum()) == 2 * (keys + 3 - tokens)
    out = torch.full_like(wide, torch.nan)
    history.turn_back(turned, out[:, 2:5], cache, False)
    assert torch.allclose(out[:, 2:5].float(), query.float(), rtol=1e-2, atol=1e-2)
    assert bool(out[:, [0, 1, 5, 6, 7]].isnan().all())


def test_other_rows_are_refused(on_cpu: None) -> None:
    cache = poisoned(ALL[1], 1, 64, 16)
    for rows in (
        torch.zeros(3, 2, 64)[..., 1:],
        torch.zeros(3, 64, 2).transpose(1, 2),
        torch.zeros(3, 66)[:, None, :64],
    ):
        with pytest.raises(ValueError, match="expected heads one after another"):
            history.turn(rows, cache)
        numbers, out = [torch.zeros(2, dtype=torch.int32)] * 3, torch.zeros(rows.shape)
        for query, found in ((rows, out), (out, rows)):
            with pytest.raises(ValueError, match="expected heads one after another"):
                cuda.attend(query, cache, *numbers, 1, 1.0, found, Tuned(8, 1), 1)


def test_a_part_that_lies_otherwise_is_refused(on_cpu: None) -> None:
    out, cache = torch.zeros(3, 2, 64), poisoned(ALL[1], 1, 64, 16)
    for part in (torch.zeros(3, 2, 64), torch.zeros(2, 3, 64).half().transpose(0, 1), torch.zeros(4, 2, 64).half()):
        with pytest.raises(ValueError, match=r"expected \(3, 2, 64\) of float16, one number after another"):
            history.turn_back(part, out, cache, False)


def test_other_shapes_are_refused() -> None:
    format = FORMATS["turboquant_4bit_nc"]
    with pytest.raises(ValueError, match="block size 24"):
        cuda.Cache(torch.zeros(1, 24 * 68, dtype=torch.uint8), format, 1, 64, 24, 68, 24 * 68)
    with pytest.raises(ValueError, match="head_dim 512"):
        cuda.Cache(torch.zeros(16, dtype=torch.uint8), format, 1, 512, 16, 516, 16 * 516)
