"""attend.cu's own code on a CPU against naive.py, at small and odd sizes: shim.h plays the GPU's instructions."""

from __future__ import annotations

import pytest
import torch
from sparkpin_turboquant import cuda, naive, rotation
from sparkpin_turboquant.formats import FORMATS, layout
from sparkpin_turboquant.tuned import Tuned, splits_of, variant_for

TUNED = Tuned(warps=8, blocks=1)


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


MIXED = [(64, 2), (0, 0), (17, 1), (140, 8)]
# format, head_dim, query heads, KV heads, block size, programs, (cached tokens, queries) of each sequence
CASES = [
    ("turboquant_4bit_nc", 256, 16, 1, 48, 2, [(140, 3), (128, 3), (3, 3)]),
    ("turboquant_4bit_nc", 256, 32, 2, 16, 1, [(5, 5), (1, 1)]),
    ("turboquant_4bit_nc", 128, 8, 2, 32, 8, MIXED),
    ("turboquant_4bit_nc", 64, 4, 2, 16, 6, [(1, 1), (40, 1)] + [(9, 1)] * 40),
    ("turboquant_k8v4", 256, 8, 2, 16, 4, [(33, 1), (180, 1)]),
    ("turboquant_k8v4", 128, 8, 2, 16, 4, [(33, 1), (80, 1)]),
    ("turboquant_k8v4", 64, 7, 1, 16, 4, [(33, 1), (80, 1)]),
    ("turboquant_4bit_nc", 64, 6, 2, 16, 4, [(31, 4), (48, 3)]),
    ("turboquant_k8v4", 64, 32, 2, 32, 5, [(64, 3), (265, 3)]),
]


def run(built, name, head_dim, heads, kv_heads, block_size, programs, work, pieces=None, keys=1.0, query=None) -> None:
    """`pieces`: (request, first query, queries) of each sequence, where they are parts of the requests in `work`.

    `keys`: their size. `query`: other than random ones.
    """
    format, requests = FORMATS[name], len(work)
    slot = format.slot_bytes(head_dim) + 2
    count, size = sum(-(-length // block_size) for length, _ in work) + 1, kv_heads * block_size * slot
    data = torch.full((count, size + 48), 0x7E, dtype=torch.uint8)  # norms are NaN
    blocks = naive.Blocks(data[:, :size], format, kv_heads, head_dim, block_size, slot)
    order = iter(torch.randperm(count, generator=torch.Generator().manual_seed(3)).tolist())
    table = torch.zeros(requests, max(-(-length // block_size) for length, _ in work), dtype=torch.int32)
    slots = []
    for i, (length, _) in enumerate(work):
        for j in range(-(-length // block_size)):
            table[i, j] = next(order)
        n = torch.arange(length)
        slots.append(table[i, n // block_size] * block_size + n % block_size)
        key, value = (gaussian(length, kv_heads, head_dim, seed=seed + i) for seed in (10, 90))
        key *= keys
        key[length // 2 :] *= 100  # weights move beyond what they were relative to
        blocks.write(key, value, slots[-1].long())
    counts = [queries for _, queries in work]
    whole = [sum(counts[:i]) for i in range(requests + 1)]
    pieces = pieces or [(i, 0, queries) for i, queries in enumerate(counts)]
    starts = torch.tensor([whole[i] + at for i, at, _ in pieces] + [whole[-1]], dtype=torch.int32)
    lengths = torch.tensor([work[i][0] - counts[i] + at + many for i, at, many in pieces], dtype=torch.int32)
    owners = torch.tensor([i for i, _, _ in pieces], dtype=torch.int32)
    most = max(many for _, _, many in pieces)
    splits = splits_of(most, heads // kv_heads)
    group, parts, places = heads // kv_heads // splits, kv_heads * splits, programs + len(pieces)
    variant = variant_for(TUNED, format, head_dim, most * group, wide=True)
    query = gaussian(whole[-1] + 2, heads, head_dim, seed=5) if query is None else query
    out = torch.full_like(query, torch.nan)
    part = torch.full((places, parts, most * group, head_dim), torch.nan, dtype=torch.float16)
    logs = torch.full((places, parts, most * group), torch.nan)
    cache_ = cuda.Cache(data, format, kv_heads, head_dim, block_size, slot, size + 48)
    signs = rotation.signs(head_dim)
    args = cuda.arguments(
        part, logs, query, out, signs, cache_, table, lengths, starts, owners, head_dim**-0.5, programs, splits
    )
    on_cpu = built(variant)
    for launch in variant.launches(args, parts):
        on_cpu.launch(launch, args, 0)
    for i, many in enumerate(counts):
        if many:
            mine = slice(whole[i], whole[i + 1])
            wanted = naive.attend(query[mine], blocks, slots[i].long(), head_dim**-0.5)
            # Weights are rounded to bfloat16, queries to float16, which logits of some hundred feel.
            assert torch.equal(out[mine].isnan(), wanted.isnan())
            there = ~wanted.isnan()
            assert float((out[mine] - wanted)[there].norm() / wanted[there].norm()) < 1e-2, i
    assert bool(out[whole[-1] :].isnan().all())
    assert layout(format, head_dim, block_size, slot).norms == args.norms


@pytest.mark.parametrize(("name", "head_dim", "heads", "kv_heads", "block_size", "programs", "work"), CASES)
def test_attention_agrees_with_naive(built, name, head_dim, heads, kv_heads, block_size, programs, work) -> None:
    run(built, name, head_dim, heads, kv_heads, block_size, programs, work)


def test_prefill_is_many_short_sequences_of_few_requests(built) -> None:
    pieces = [(0, 0, 4), (0, 4, 4), (0, 8, 2), (1, 0, 4), (1, 4, 1)]
    run(built, "turboquant_4bit_nc", 64, 8, 2, 32, 5, [(70, 10), (5, 5)], pieces)


def test_a_query_beyond_float16_is_held_and_one_that_is_nan_says_so(built) -> None:
    """Else its operands were infinite, and their products NaN. Keys are small, so that weights differ little."""
    query = gaussian(5, 4, 64, seed=5)
    query[1] *= 1e6
    query[2, 3, 7] = torch.nan
    run(built, "turboquant_4bit_nc", 64, 4, 1, 16, 2, [(40, 3)], keys=1e-7, query=query)
