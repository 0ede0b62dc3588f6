"""The kernels' arithmetic, masks and division of the work against naive.py, at small and odd sizes."""

from __future__ import annotations

import pytest
import torch
import triton
from sparkpin_turboquant import cuda, naive
from sparkpin_turboquant.formats import FORMATS, Format

ALL = list(FORMATS.values())


@pytest.fixture(scope="module", autouse=True)
def interpreter() -> None:
    assert triton.knobs.runtime.interpret


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


def test_other_shapes_are_refused() -> None:
    format = FORMATS["turboquant_4bit_nc"]
    with pytest.raises(ValueError, match="block size 24"):
        cuda.Cache(torch.zeros(1, 24 * 68, dtype=torch.uint8), format, 1, 64, 24, 68, 24 * 68)
    with pytest.raises(ValueError, match="head_dim 512"):
        cuda.Cache(torch.zeros(16, dtype=torch.uint8), format, 1, 512, 16, 516, 16 * 516)
