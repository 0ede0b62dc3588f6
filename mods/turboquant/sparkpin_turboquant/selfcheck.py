"""The kernels against naive.py on random data, at a machine's first start (`sparkpin_modkit.selfcheck`).

Each has its own reference: what `expand` and `attend` read is what `store` wrote, wrong or not. Vectors are compared
one by one and the worst counts, so that one in thousands is seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from sparkpin_modkit.selfcheck import Compared

from sparkpin_turboquant import cuda, history, naive, prefill
from sparkpin_turboquant.formats import FORMATS
from sparkpin_turboquant.tuned import Tuned, programs_of, splits_of, tuned_for, variant_for

STORED, STORED_VECTOR, ROUNDED, ATTENDED = 2e-3, 0.15, 2e-3, 1e-2
"""Float32 sums in another order put few components on the other side of an edge: nothing to all vectors, up to 0.06 to
one. What `expand` and `turn` give is rounded to float16, the weights and outputs of `attend` and of FlashAttention to
bfloat16."""
REJECTED = 3
"""Tokens behind each sequence that are in the cache and not of it, as drafts that were not accepted."""
SLICE = 2048


@dataclass(frozen=True)
class Case:
    """What a server launches its kernels with. queries: each number of query tokens that a sequence has in a step."""

    format: str
    kv_heads: int
    group: int
    head_dim: int
    block_size: int
    slot: int
    queries: tuple[int, ...]
    dtype: str = "bfloat16"


def worst(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest relative norm of a difference of vectors ``[..., D]``; NaN where one is."""
    wanted = wanted.float()
    return float(((found.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp(min=1e-30)).max())


class Data:
    """A cache of four sequences, in blocks that lie anywhere. All that nobody wrote is NaN.

    Two are longer than a pass of all blocks of `attend`, one is nothing but new tokens, one is empty, as vLLM fills up
    a batch.
    """

    def __init__(self, case: Case, tuned: Tuned, processors: int, device: torch.device) -> None:
        self.case, self.tuned, self.device, self.format = case, tuned, device, FORMATS[case.format]
        self.random = torch.Generator(device).manual_seed(0)
        self.scale = case.head_dim**-0.5
        variant = variant_for(tuned, self.format, case.head_dim, case.group)
        programs = programs_of(variant, processors, case.kv_heads)
        longest = variant.tokens * (programs * 3 // 2 + 1) + 57
        self.lengths = [longest, variant.tokens * (programs + 1), max(case.queries), 0]
        stored = [length + REJECTED for length in self.lengths]
        width = -(-max(stored) // case.block_size)
        order = torch.randperm(4 * width, generator=self.random, device=device)
        self.table = order.view(4, width).int()
        self.slots = [self.slots_of(i, length) for i, length in enumerate(self.lengths)]
        self.written = torch.cat([self.slots_of(i, length) for i, length in enumerate(stored)])
        rows = self.normal(len(self.written) + 1, 2 * case.kv_heads)  # one more, for a token that is padding
        self.key, self.value = rows[:, : case.kv_heads], rows[:, case.kv_heads :]
        self.cache = self.empty(4 * width)
        cuda.store_tokens(
            self.key, self.value, self.cache, torch.cat([self.written, torch.full_like(self.written[:1], -1)])
        )
        self.blocks = self.as_naive(self.cache)

    def normal(self, tokens: int, heads: int) -> torch.Tensor:
        shape = (tokens, heads, self.case.head_dim)
        return torch.randn(shape, generator=self.random, device=self.device).to(getattr(torch, self.case.dtype))

    def slots_of(self, sequence: int, length: int) -> torch.Tensor:
        n = torch.arange(length, device=self.device)
        return self.table[sequence, n // self.case.block_size].long() * self.case.block_size + n % self.case.block_size

    def empty(self, blocks: int) -> cuda.Cache:
        """0x7E makes norms NaN."""
        case = self.case
        page = case.kv_heads * case.block_size * case.slot
        data = torch.full((blocks, page), 0x7E, dtype=torch.uint8, device=self.device)
        return cuda.Cache(data, self.format, case.kv_heads, case.head_dim, case.block_size, case.slot, page)

    def as_naive(self, cache: cuda.Cache) -> naive.Blocks:
        case = self.case
        return naive.Blocks(cache.data, self.format, case.kv_heads, case.head_dim, case.block_size, case.slot)

    def numbers(self, *values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


@torch.inference_mode()
def compare(
    case: Case, tuned: Tuned, processors: int, device: torch.device, flash: prefill.Attend
) -> Iterator[Compared]:
    """Each kernel on the current GPU, which `tuned` and `processors` describe. Takes up to 300 MB for a moment.

    flash: `flash.flash_attention` of the case, which prefill takes.
    """
    data = Data(case, tuned, processors, device)
    yield from _stored(data)
    yield from _not_numbers(data)
    yield from _expanded(data)
    yield from _turned(data)
    back = [data.blocks.read_rotated(slots) for slots in data.slots]
    yield from _prefilled(data, back[0], flash)
    for queries in case.queries:
        error = _attended(data, queries, back, sorted({1, 3, processors}))
        yield "attend, merge", f"{case.format}, {queries} query tokens", error, ATTENDED


def _stored(data: Data) -> Iterator[Compared]:
    wanted = data.empty(data.cache.data.shape[0])
    reference, errors, sizes, one = data.as_naive(wanted), 0.0, 0.0, []
    for at in torch.arange(len(data.written), device=data.device).split(SLICE):
        reference.write(data.key[at], data.value[at], data.written[at])
        for found, right in zip(
            data.blocks.read_rotated(data.written[at]), reference.read_rotated(data.written[at]), strict=True
        ):
            errors += float((found - right).norm() ** 2)
            sizes += float(right.norm() ** 2)
            one.append(worst(found, right))
    yield "store", f"{data.case.format}, all vectors", (errors / sizes) ** 0.5, STORED
    yield "store", f"{data.case.format}, the worst vector", float(torch.tensor(one).max()), STORED_VECTOR
    beside = float((data.cache.data != wanted.data).float().mean())
    yield "store", f"{data.case.format}, bytes", beside, STORED


def _not_numbers(data: Data) -> Iterator[Compared]:
    """NaN stays NaN, also that of two infinite components, which have no direction; one of them is held."""
    case, slots = data.case, torch.arange(3, device=data.device)
    rows = data.normal(3, 2 * case.kv_heads)
    rows[0, :, 5], rows[1, :, 63], rows[2, :, 3], rows[2, :, 40] = torch.nan, torch.inf, torch.inf, torch.inf
    key, value = rows[:, : case.kv_heads], rows[:, case.kv_heads :]
    cache, wanted = data.empty(1), data.empty(1)
    cuda.store_tokens(key, value, cache, slots)
    data.as_naive(wanted).write(key, value, slots)
    found, right = (torch.stack(data.as_naive(one).read_rotated(slots)) for one in (cache, wanted))
    differ = ~found.isclose(right, rtol=STORED, equal_nan=True)
    yield "store", f"{case.format}, NaN and infinity", float(differ.float().mean()), STORED
    plain = torch.zeros(2, case.kv_heads, 3, case.head_dim, dtype=torch.float16, device=data.device)
    history.expand_tokens(plain[0], plain[1], cache, data.numbers(0), 0, 3)
    differ = plain.isnan() != right.isnan().transpose(1, 2)
    yield "expand", f"{case.format}, NaN", float(differ.float().mean()), ROUNDED


def _expanded(data: Data) -> Iterator[Compared]:
    """All but the first and the last tokens of the longest sequence."""
    first, count = 7, data.lengths[0] - 18
    found = torch.full((2, data.case.kv_heads, count, data.case.head_dim), torch.nan, dtype=torch.float16)
    found = found.to(data.device)
    history.expand_tokens(found[0], found[1], data.cache, data.table[0], first, count)
    right = data.blocks.read_rotated(data.slots[0][first : first + count])
    error = worst(found, torch.stack(right).transpose(1, 2))
    yield "expand", f"{data.case.format}, {count} tokens", error, ROUNDED


def _turned(data: Data) -> Iterator[Compared]:
    """New tokens of two sequences into the rotated space, behind their histories, and results back."""
    case, new, old = data.case, 9, 5
    query, rows = data.normal(2 * new, case.kv_heads * case.group), data.normal(2 * new, 2 * case.kv_heads)
    key, value = rows[:, : case.kv_heads], rows[:, case.kv_heads :]
    room = torch.full((2, case.kv_heads, 2 * (new + old), case.head_dim), torch.nan, dtype=torch.float16)
    room = room.to(data.device)
    starts, key_starts = data.numbers(0, new, 2 * new), data.numbers(0, new + old, 2 * (new + old))
    turned = history.turn_new(query, key, value, data.cache, (room[0], room[1]), starts, key_starts)
    behind = torch.cat([room[:, :, old : new + old], room[:, :, new + 2 * old :]], dim=2).transpose(1, 2)
    error = worst(turned, naive.rotate(query))
    yield "turn", f"{case.format}, queries", error, ROUNDED
    yield "turn", f"{case.format}, new tokens", worst(behind, naive.rotate(torch.stack([key, value]))), ROUNDED
    out, part = query.clone(), naive.rotate(data.normal(2 * new, query.shape[1])).half()
    logs, part_logs = (data.normal(query.shape[1], 1)[:, 0, : 2 * new].float().contiguous() for _ in range(2))
    share = (part_logs - logs).sigmoid().T.unsqueeze(-1)
    wanted = query.float() * (1 - share) + naive.unrotate(part) * share
    history.fold_into(out, logs, part, part_logs, data.cache)
    yield "fold", case.format, worst(out, wanted), ATTENDED


def _attention(data: Data, rotated: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`naive.attention` of one sequence, in the rotated space: head by head, which takes less memory."""
    found = torch.empty_like(rotated)
    for head in range(rotated.shape[1]):
        its = slice(head // data.case.group, head // data.case.group + 1)
        found[:, head : head + 1] = naive.attention(rotated[:, head : head + 1], key[:, its], value[:, its], data.scale)
    return naive.unrotate(found)


def _prefilled(data: Data, back: tuple[torch.Tensor, torch.Tensor], flash: prefill.Attend) -> Iterator[Compared]:
    """The last tokens of the longest sequence as new ones: after the history, and joined with it."""
    case, new, length = data.case, 33, data.lengths[0]
    query, at = data.normal(new, case.kv_heads * case.group), slice(length - new, length)
    key, value = data.key[at], data.value[at]  # the longest sequence is the first
    sides = (torch.cat([old[: at.start], naive.rotate(x)]) for old, x in zip(back, (key, value), strict=True))
    wanted = _attention(data, naive.rotate(query), *sides)
    space = prefill.Workspace.of(case.kv_heads, case.head_dim, data.device, length)
    for joined, room in ((0, length * 2 // 3), (new, length)):  # the history takes two rounds, or none
        plan = prefill.plan([0, new], [length], data.device, room, joined=joined)
        out = torch.full_like(query, torch.nan)
        prefill.attend(query, key, value, data.cache, data.table, plan, space, flash, out, data.tuned.overlap)
        yield "FlashAttention", f"{case.format}, {'joined' if joined else 'in parts'}", worst(out, wanted), ATTENDED


def _attended(data: Data, queries: int, back: list[tuple[torch.Tensor, torch.Tensor]], processors: list[int]) -> float:
    """The same on all multiprocessors and on few, whose blocks pass over more tiles and more sequences.

    One sequence has a query less. On few, rows of the table are named (`owners`) and lie the other way round.
    """
    case, many = data.case, [queries, max(1, queries - 1), queries, 0]
    at = [sum(many[:i]) for i in range(5)]
    query = data.normal(at[-1], case.kv_heads * case.group)
    rotated = naive.rotate(query).clamp(-naive.FLOAT16_MAX, naive.FLOAT16_MAX)
    wanted = torch.cat([_attention(data, rotated[at[i] : at[i + 1]], *back[i]) for i in range(3)])
    lengths, starts = data.numbers(*data.lengths), data.numbers(*at)
    splits = splits_of(queries, case.group)
    found = []
    for count in processors:
        named = count < processors[-1]
        rows, owners = (data.table.flip(0), data.numbers(3, 2, 1, 0)) if named else (data.table, None)
        heads = case.kv_heads * splits if named else 1  # so that a head has so many blocks
        out = torch.full_like(query, torch.nan)
        rest = (data.scale, out, data.tuned, count * heads, owners)
        found.append(cuda.attend(query, data.cache, rows, lengths, starts, queries, *rest))
    return worst(torch.stack(found), wanted.expand(len(found), *wanted.shape))


def check() -> Iterator[Compared]:
    """All formats, with the 122B's heads, up to four drafts: entry point of ``sparkpin.selfcheck``."""
    from sparkpin_turboquant.flash import flash_attention  # not to be imported where there is no GPU

    device = torch.device("cuda", torch.cuda.current_device())
    gpu = torch.cuda.get_device_properties(device)
    for name, format in FORMATS.items():
        case = Case(name, 2, 16, 256, 1152, format.slot_bytes(256) + 2 * (name != "turboquant_k8v4"), (1, 2, 3, 4, 5))
        tuned, flash = tuned_for(10 * gpu.major + gpu.minor), flash_attention(256, 256**-0.5)
        yield from compare(case, tuned, gpu.multi_processor_count, device, flash)
