"""The kernels' arithmetic, masks and division of the work against naive.py, at small and odd sizes."""

from __future__ import annotations

import pytest
import torch
from sparkpin_turboquant import cuda, naive, unpack
from sparkpin_turboquant.formats import FORMATS, Format
from sparkpin_turboquant.tuned import Tuned

ALL = list(FORMATS.values())


@pytest.fixture(scope="module", autouse=True)
def interpreter() -> None:
    assert unpack.INTERPRETED


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
def test_stored_as_naive_stores(format: Format, head_dim: int) -> None:
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


SMALL = (
    Tuned(columns=16, tokens=16, warps=4, stages=2, programs=1, share=1),
    Tuned(columns=48, tokens=32, warps=4, stages=2, programs=1, share=2, pairs=True),
    Tuned(columns=128, tokens=32, warps=4, stages=2, programs=1, share=1),
)
# format, head_dim, query heads, KV heads, block size, programs, (cached tokens, queries) of each sequence
CASES = [
    ("turboquant_4bit_nc", 64, 4, 2, 16, 6, [(1, 1), (40, 1), (33, 1)]),
    ("turboquant_4bit_nc", 256, 16, 1, 48, 3, [(70, 3), (16, 3), (3, 3)]),
    ("turboquant_4bit_nc", 128, 8, 2, 32, 8, [(64, 2), (0, 0), (17, 1), (95, 8)]),
    ("turboquant_4bit_nc", 64, 16, 1, 32, 1, [(90, 8), (8, 8)]),
    ("turboquant_k8v4", 128, 8, 2, 16, 4, [(33, 1), (80, 1)]),
    ("turboquant_k3v4_nc", 64, 6, 2, 16, 4, [(31, 4), (48, 3)]),
    ("turboquant_3bit_nc", 128, 8, 2, 16, 4, [(33, 1), (15, 1)]),
    ("turboquant_3bit_nc", 64, 32, 2, 32, 5, [(64, 3), (65, 3)]),
]


@pytest.mark.parametrize(("name", "head_dim", "heads", "kv_heads", "block_size", "programs", "work"), CASES)
def test_attention_agrees_with_naive(name, head_dim, heads, kv_heads, block_size, programs, work) -> None:
    cache = poisoned(FORMATS[name], kv_heads, head_dim, block_size, blocks=20)
    blocks = as_naive(cache)
    table = torch.zeros(len(work), 8, dtype=torch.int32)
    order = iter(torch.randperm(20, generator=torch.Generator().manual_seed(3)).tolist())
    slots = []
    for i, (length, _) in enumerate(work):
        for j in range(-(-length // block_size)):
            table[i, j] = next(order)
        n = torch.arange(length)
        slots.append(table[i, n // block_size] * block_size + n % block_size)
        key, value = (
            gaussian(length, kv_heads, head_dim, seed=10 + i),
            gaussian(length, kv_heads, head_dim, seed=50 + i),
        )
        key[: length // 2] *= 3  # tops move
        blocks.write(key, value, slots[-1])
    counts = [queries for _, queries in work]
    starts = torch.tensor([sum(counts[:i]) for i in range(len(counts) + 1)], dtype=torch.int32)
    query = gaussian(sum(counts) + 2, heads, head_dim, seed=5)
    out = torch.full_like(query, torch.nan)
    lengths = torch.tensor([length for length, _ in work], dtype=torch.int32)
    scale = head_dim**-0.5
    cuda.attend(query, cache, table, lengths, starts, max(counts), scale, out, SMALL, programs * kv_heads)
    for i, count in enumerate(counts):
        if count:
            mine = slice(int(starts[i]), int(starts[i + 1]))
            wanted = naive.attend(query[mine], blocks, slots[i], scale)
            assert float((out[mine] - wanted).norm() / wanted.norm()) < 2e-3, i
    assert bool(out[sum(counts) :].isnan().all())


def test_prefill_is_many_short_sequences_of_one_request() -> None:
    """Query tokens four by four, each four with the cache up to its last."""
    cache = poisoned(FORMATS["turboquant_4bit_nc"], 2, 64, 32, blocks=4)
    blocks = as_naive(cache)
    table = torch.tensor([[0, 0, 0], [3, 1, 2]], dtype=torch.int32)
    n = torch.arange(70)
    slots = table[1, n // 32] * 32 + n % 32
    blocks.write(gaussian(70, 2, 64, seed=1), gaussian(70, 2, 64, seed=2), slots)
    query = gaussian(10, 8, 64, seed=3)
    out = torch.full_like(query, torch.nan)
    starts = torch.tensor([0, 4, 8, 10], dtype=torch.int32)
    lengths = torch.tensor([64, 68, 70], dtype=torch.int32)
    owners = torch.ones(3, dtype=torch.int32)
    cuda.attend(query, cache, table, lengths, starts, 4, 0.125, out, SMALL, 10, owners)
    wanted = naive.attend(query, blocks, slots, 0.125)
    assert float((out - wanted).norm() / wanted.norm()) < 2e-3


def test_other_shapes_are_refused() -> None:
    format = FORMATS["turboquant_4bit_nc"]
    with pytest.raises(ValueError, match="block size 24"):
        cuda.Cache(torch.zeros(1, 24 * 68, dtype=torch.uint8), format, 1, 64, 24, 68, 24 * 68)
    with pytest.raises(ValueError, match="head_dim 512"):
        cuda.Cache(torch.zeros(16, dtype=torch.uint8), format, 1, 512, 16, 516, 16 * 516)
