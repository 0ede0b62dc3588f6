"""The CUDA backend on a CPU: what vLLM hands it, against `naive`. Attention itself stands in as `naive`'s."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from flash_on_cpu import flash
from sparkpin_turboquant import gpu, naive, prefill
from sparkpin_turboquant.common import vllm_slot_bytes
from sparkpin_turboquant.formats import FORMATS
from sparkpin_turboquant.tuned import Tuned

CPU = torch.device("cpu")
BLOCK = 32


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def made(name: str, heads: int = 4, kv_heads: int = 2, head_dim: int = 64, **arguments: object) -> gpu.GpuImpl:
    class Impl(gpu.GpuImpl):
        def find_flash(self):
            return lambda *x: flash(self.scale, *x)

    return Impl(heads, head_dim, head_dim**-0.5, kv_heads, kv_cache_dtype=name, **arguments)


def empty_cache(name: str, blocks: int, kv_heads: int, head_dim: int) -> torch.Tensor:
    """``[blocks, Hkv, BLOCK, slot]``, heads inside tokens in memory; 0x7E makes norms NaN."""
    slot = vllm_slot_bytes(FORMATS[name], head_dim)
    return torch.full((blocks, BLOCK, kv_heads, slot), 0x7E, dtype=torch.uint8).transpose(1, 2)


def attend(query, cache_, table, lengths, starts, most_queries, scale, out, tuned, processors, owners=None) -> None:
    """Stands for the decode kernel, which is CUDA C++: the same contract, by `naive`."""
    size = cache_.heads * cache_.block_size * cache_.slot
    blocks = naive.Blocks(
        cache_.data[:, :size], cache_.format, cache_.heads, cache_.head_dim, cache_.block_size, cache_.slot
    )
    for i, length in enumerate(lengths.tolist()):
        a, b = starts[i : i + 2].tolist()
        assert b - a <= most_queries
        place = torch.arange(length)
        slots = table[i if owners is None else owners[i]][place // BLOCK].long() * BLOCK + place % BLOCK
        out[a:b] = naive.attend(query[a:b], blocks, slots, scale)


class Common(SimpleNamespace):
    """The fields of vLLM's CommonAttentionMetadata that are read."""


def builder(speculative: int, few: int = 0, joined: int = 0, room: int = 40) -> gpu.GpuMetadataBuilder:
    class Builder(gpu.GpuMetadataBuilder):
        def __init__(self) -> None:
            self.reorder_batch_threshold = 1 + speculative
            self.room, self.few, self.piece, self.joined = room, few, 4, joined
            self.device = CPU

    return Builder()


def workspace(heads: int, head_dim: int, device: torch.device, room: int) -> prefill.Workspace:
    made = prefill.Workspace.of(heads, head_dim, device, room)
    made.key.fill_(math.nan)
    made.value.fill_(math.nan)
    return made


@pytest.mark.parametrize(
    ("name", "few", "joined", "room", "how"),
    [
        ("turboquant_4bit_nc", 19, 0, 40, "parts"),
        ("turboquant_k8v4", 19, 0, 40, "parts"),
        ("turboquant_4bit_nc", 20, 20, 139, "few"),
        ("turboquant_4bit_nc", 19, 20, 139, "joined"),
        ("turboquant_k8v4", 0, 64, 150, "joined"),
        ("turboquant_4bit_nc", 19, 19, 139, "parts"),
        ("turboquant_4bit_nc", 19, 20, 138, "parts"),
    ],
)
def test_a_batch_of_decode_steps_and_prefills(
    name: str, few: int, joined: int, room: int, how: str, monkeypatch: pytest.MonkeyPatch, on_cpu: None
) -> None:
    """Two verification steps (one of fewer tokens), a first prefill and two that go on; one padded token.

    The prefills' new tokens are 20 at most, and all their tokens 139.
    """
    monkeypatch.setattr(gpu.cuda, "attend", attend)
    monkeypatch.setattr(gpu, "_gpu", lambda device: (Tuned(8, 1), 1))
    monkeypatch.setattr(gpu, "_workspace", lambda *x: workspace(*x, room=room))
    layer = made(name)
    kv_cache = empty_cache(name, 12, 2, 64)
    table = torch.tensor([[7, 2, 0], [4, 0, 0], [11, 0, 0], [3, 9, 5], [8, 1, 0]], dtype=torch.int32)
    lengths, new = [50, 5, 9, 90, 40], [3, 2, 9, 20, 5]
    keys = [normal(n, 2, 64, seed=10 + i) for i, n in enumerate(lengths)]
    values = [normal(n, 2, 64, seed=20 + i) for i, n in enumerate(lengths)]

    def slots(request: int, first: int, last: int) -> list[int]:
        return [int(table[request, t // BLOCK]) * BLOCK + t % BLOCK for t in range(first, last)]

    for i, (length, count) in enumerate(zip(lengths, new, strict=True)):
        mapping = torch.tensor(slots(i, 0, length - count), dtype=torch.int64)
        layer.do_kv_cache_update(None, keys[i], values[i], kv_cache, mapping)
    mapping = torch.tensor([s for i in range(5) for s in slots(i, lengths[i] - new[i], lengths[i])] + [-1])
    key = torch.cat([keys[i][-new[i] :] for i in range(5)] + [normal(1, 2, 64, seed=5)])
    value = torch.cat([values[i][-new[i] :] for i in range(5)] + [normal(1, 2, 64, seed=6)])
    layer.do_kv_cache_update(None, key, value, kv_cache, mapping)
    starts = torch.tensor([0, 3, 5, 14, 34, 39], dtype=torch.int32)
    common = Common(
        causal=True,
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.tensor(lengths, dtype=torch.int32),
        block_table_tensor=table,
        num_reqs=5,
        num_actual_tokens=39,
        max_query_len=20,
    )
    step = builder(2, few, joined, room).build(0, common)
    assert (step.decodes, step.decode_tokens, step.most_queries) == (2, 5, 3)
    taken = {"few": step.prefill.few, "joined": step.prefill.joined, "parts": step.prefill.parts}
    assert [key for key, value in taken.items() if value] == [how]
    query = normal(40, 4, 64, seed=3)
    output = torch.full((40, 4 * 64), math.nan)
    assert layer.forward(None, query, key, value, kv_cache, step, output) is output
    format, at = FORMATS[name], 0
    for i in range(5):
        old = lengths[i] - (new[i] if i >= 2 and how != "few" else 0)  # prefill sees its own tokens as they are
        back = [
            torch.cat((naive.dequantise(*naive.quantise(x[:old], bits), bits), x[old:].float()))
            for x, bits in ((keys[i], format.key_bits), (values[i], 4))
        ]
        wanted = naive.attention(query[at : at + new[i]], *back, layer.scale)
        got = output.view(40, 4, 64)[at : at + new[i]].float()
        assert (got - wanted).norm() / wanted.norm() < 0.002, i
        at += new[i]
    assert bool(output[39].isnan().all())
    common.seq_lens_cpu_upper_bound = None  # then lengths are read from the GPU
    again = builder(2, few, joined, room).build(0, common).prefill
    assert [part.pieces for part in again.parts] == [part.pieces for part in step.prefill.parts]
    if how == "joined":
        assert again.joined.pieces == step.prefill.joined.pieces


def test_a_step_of_one_token_each_takes_the_narrow_kernel() -> None:
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
    lengths = torch.tensor([9, 4], dtype=torch.int32)
    common = Common(
        causal=True,
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths,
        block_table_tensor=torch.zeros(2, 1, dtype=torch.int32),
        num_reqs=2,
        num_actual_tokens=2,
        max_query_len=1,
    )
    step = builder(2).build(0, common)
    assert (step.decodes, step.most_queries, step.prefill) == (2, 1, None)
    common.causal = False
    with pytest.raises(NotImplementedError, match="not causal"):
        builder(2).build(0, common)


def test_profiling_reserves_the_workspace_and_gives_zeros() -> None:
    output = torch.ones(3, 4 * 64, dtype=torch.bfloat16)
    gpu._workspace.cache_clear()
    query = normal(3, 4, 64, seed=1)
    made("turboquant_4bit_nc").forward(None, query, None, None, torch.empty(0), None, output)
    assert not output.any()
    assert gpu._workspace.cache_info().currsize == 1
    gpu._workspace.cache_clear()
