"""Prefill: new tokens see each other as they are, and what is cached through `history`, round by round.

Both parts are FlashAttention's; its logarithms of sums let the parts be folded together. So a long history is never in
memory at full width: `ROOM` tokens of it are, twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from sparkpin_turboquant import history
from sparkpin_turboquant.cuda import Cache
from sparkpin_turboquant.rounds import Piece, rounds

ROOM = 16384

Attend = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""``(query, key, value, query_starts, key_starts, most_queries, most_keys, causal, out)`` -> output ``[T, H, D]`` and
logarithms of the sums of exponents, natural, ``[H, T]`` float32. key, value ``[S, Hkv, D]``."""


@dataclass(frozen=True)
class Part:
    """A round: queries `begin` to `end` over the pieces. Requests count from the batch's first prefill."""

    pieces: tuple[Piece, ...]
    begin: int
    end: int
    query_starts: torch.Tensor
    key_starts: torch.Tensor
    most_queries: int
    most_keys: int


@dataclass(frozen=True)
class Prefill:
    """The requests of a batch that are no decode steps: ``starts`` ``[R + 1]`` int32 of their queries, from 0 on."""

    tokens: int
    starts: torch.Tensor
    most_queries: int
    parts: tuple[Part, ...]


def plan(starts: Sequence[int], lengths: Sequence[int], device: torch.device, room: int = ROOM) -> Prefill:
    """On the host.

    Args:
        starts: ``R + 1``, where each request's queries start; the first is 0.
        lengths: ``R``, tokens in the cache, those of the queries included.
    """
    queries = [end - begin for begin, end in pairwise(starts)]
    cut = rounds([length - count for length, count in zip(lengths, queries, strict=True)], room)
    numbers = list(starts)
    parts = []
    for pieces in cut:
        a, b = pieces[0].request, pieces[-1].request + 1
        counts = dict.fromkeys(range(a, b), 0) | {piece.request: piece.count for piece in pieces}
        at = len(numbers)
        numbers += [start - starts[a] for start in starts[a : b + 1]]
        numbers += [0, *accumulate(counts.values())]
        parts.append((pieces, a, b, at, max(counts.values())))
    memory = torch.tensor(numbers, dtype=torch.int32, pin_memory=device.type == "cuda")
    sent = memory.to(device, non_blocking=True)
    return Prefill(
        tokens=starts[-1],
        starts=sent[: len(starts)],
        most_queries=max(queries),
        parts=tuple(
            Part(
                pieces=pieces,
                begin=starts[a],
                end=starts[b],
                query_starts=sent[at : at + b - a + 1],
                key_starts=sent[at + b - a + 1 : at + 2 * (b - a + 1)],
                most_queries=max(queries[a:b]),
                most_keys=most_keys,
            )
            for pieces, a, b, at, most_keys in parts
        ),
    )


@dataclass(frozen=True)
class Workspace:
    """``[room, 2, Hkv, D]`` twice: rotated, and turned back."""

    rotated: torch.Tensor
    plain: torch.Tensor

    @classmethod
    def of(cls, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, room: int = ROOM) -> Workspace:
        both = torch.empty(2, room, 2, heads, head_dim, dtype=dtype, device=device)
        return cls(both[0], both[1])

    def read(self, cache_: Cache, table: torch.Tensor, pieces: Sequence[Piece]) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value ``[tokens, Hkv, D]`` of the pieces, one after another. table: ``[R, blocks]`` int32."""
        total = 0
        for piece in pieces:
            row = table[piece.request]
            history.expand_tokens(self.rotated, cache_, row, piece.first, piece.count, total)
            total += piece.count
        head_dim = cache_.head_dim
        matrix = history.back(head_dim, self.plain.device, self.plain.dtype)
        rotated, plain = (x[:total].view(-1, head_dim) for x in (self.rotated, self.plain))
        torch.mm(rotated, matrix, out=plain)
        return self.plain[:total, 0], self.plain[:total, 1]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache_: Cache,
    table: torch.Tensor,
    prefill: Prefill,
    workspace: Workspace,
    flash: Attend,
    out: torch.Tensor,
) -> None:
    """``query``, ``out`` ``[T, H, D]``, ``key``, ``value`` ``[T, Hkv, D]``: the new tokens, which are in the cache too.

    table: ``[R, blocks]`` int32 of these requests.
    """
    most = prefill.most_queries
    _, logs = flash(query, key, value, prefill.starts, prefill.starts, most, most, True, out)
    for part in prefill.parts:
        old_key, old_value = workspace.read(cache_, table, part.pieces)
        mine = slice(part.begin, part.end)
        starts = (part.query_starts, part.key_starts)
        found = flash(query[mine], old_key, old_value, *starts, part.most_queries, part.most_keys, False, None)
        history.fold_into(out[mine], logs[:, mine], *found)
