"""Prefill: new tokens see each other as they are, and what is cached through `history`, round by round.

Both parts are FlashAttention's; its logarithms of sums let the parts be folded together. So a long history is never in
memory at full width: `room_of` tokens of it are. A few queries after a history are decode steps instead. Where all fits
the room the new tokens may stand behind the history there, rotated as it is: one FlashAttention, nothing to fold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from sparkpin_turboquant import history
from sparkpin_turboquant.cuda import Cache
from sparkpin_turboquant.rounds import Piece, rounds

ROOM, BYTES = 131072, 2**28
"""The most tokens of history that are at full width at a time, and the most memory for them."""


def room_of(heads: int, head_dim: int) -> int:
    """Tokens, for so many KV heads."""
    return min(ROOM, BYTES // (4 * heads * head_dim) // 16 * 16)


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
class Few:
    """Requests cut into pieces of few queries each, which are attended to as decode steps are; see `cuda.attend`."""

    starts: torch.Tensor
    lengths: torch.Tensor
    owners: torch.Tensor
    most_queries: int


@dataclass(frozen=True)
class Joined:
    """Keys of all requests in the workspace, one request after another, new ones behind each history.

    pieces: histories, and where in the workspace each starts. key_starts: ``[R + 1]`` int32.
    """

    pieces: tuple[tuple[Piece, int], ...]
    key_starts: torch.Tensor
    most_keys: int
    tokens: int


@dataclass(frozen=True)
class Prefill:
    """The requests of a batch that are no decode steps: ``starts`` ``[R + 1]`` int32 of their queries, from 0 on."""

    tokens: int
    starts: torch.Tensor
    most_queries: int
    parts: tuple[Part, ...]
    few: Few | None = None
    joined: Joined | None = None


def plan_few(starts: Sequence[int], lengths: Sequence[int], device: torch.device, piece: int) -> Prefill:
    """As `plan`, in pieces of up to `piece` queries."""
    cut = [
        (request, at, min(piece, end - at))
        for request, (begin, end) in enumerate(pairwise(starts))
        for at in range(begin, end, piece)
    ]
    numbers = [
        *(at for _, at, _ in cut),
        starts[-1],
        *(lengths[request] - starts[request + 1] + at + count for request, at, count in cut),
        *(request for request, _, _ in cut),
        *starts,
    ]
    sent = _sent(numbers, device)
    first, second = len(cut) + 1, 2 * len(cut) + 1
    few = Few(sent[:first], sent[first:second], sent[second : second + len(cut)], max(count for _, _, count in cut))
    most = max(end - begin for begin, end in pairwise(starts))
    return Prefill(starts[-1], sent[second + len(cut) :], most, (), few)


def _sent(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    memory = torch.tensor(numbers, dtype=torch.int32, pin_memory=device.type == "cuda")
    return memory.to(device, non_blocking=True)


def plan_joined(
    starts: Sequence[int], lengths: Sequence[int], histories: Sequence[int], device: torch.device
) -> Prefill:
    """As `plan`, one FlashAttention for all."""
    at = [0, *accumulate(lengths)]
    sent = _sent([*starts, *at], device)
    pieces = tuple((Piece(i, 0, count), at[i]) for i, count in enumerate(histories) if count)
    joined = Joined(pieces, sent[len(starts) :], max(lengths), at[-1])
    most = max(end - begin for begin, end in pairwise(starts))
    return Prefill(starts[-1], sent[: len(starts)], most, (), joined=joined)


def plan(
    starts: Sequence[int],
    lengths: Sequence[int],
    device: torch.device,
    room: int,
    few: int = 0,
    piece: int = 1,
    joined: int = 0,
) -> Prefill:
    """On the host.

    Args:
        starts: ``R + 1``, where each request's queries start; the first is 0.
        lengths: ``R``, tokens in the cache, those of the queries included.
        room: tokens of history that are expanded at a time, the `Workspace`'s.
        few: where no request has more queries, those after a history are cut into pieces of `piece` of them.
        joined: where no request has more queries and all tokens fit the room, history and queries are taken at once.
    """
    queries = [end - begin for begin, end in pairwise(starts)]
    histories = [length - count for length, count in zip(lengths, queries, strict=True)]
    if any(histories) and max(queries) <= few:
        return plan_few(starts, lengths, device, piece)
    if any(histories) and max(queries) <= joined and sum(lengths) <= room:
        return plan_joined(starts, lengths, histories, device)
    cut = rounds(histories, room)
    numbers = list(starts)
    parts = []
    for pieces in cut:
        a, b = pieces[0].request, pieces[-1].request + 1
        counts = dict.fromkeys(range(a, b), 0) | {piece.request: piece.count for piece in pieces}
        at = len(numbers)
        numbers += [start - starts[a] for start in starts[a : b + 1]]
        numbers += [0, *accumulate(counts.values())]
        parts.append((pieces, a, b, at, max(counts.values())))
    sent = _sent(numbers, device)
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
    """Keys and values, ``[Hkv, room, D]`` float16: whole lines are written, and read, for each head."""

    key: torch.Tensor
    value: torch.Tensor

    @classmethod
    def of(cls, heads: int, head_dim: int, device: torch.device, room: int = 0) -> Workspace:
        both = torch.empty(2, heads, room or room_of(heads, head_dim), head_dim, dtype=torch.float16, device=device)
        return cls(both[0], both[1])

    @property
    def room(self) -> int:
        return self.key.shape[1]

    def read(self, cache_: Cache, table: torch.Tensor, pieces: Sequence[Piece]) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated key and value ``[tokens, Hkv, D]`` of the pieces, one after another. table: ``[R, blocks]`` int32."""
        total = 0
        for piece in pieces:
            at = slice(total, total + piece.count)
            place = self.key[:, at], self.value[:, at]
            history.expand_tokens(*place, cache_, table[piece.request], piece.first, piece.count)
            total += piece.count
        return self.key[:, :total].transpose(0, 1), self.value[:, :total].transpose(0, 1)


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
    overlap: bool = False,
) -> None:
    """``query``, ``out`` ``[T, H, D]``, ``key``, ``value`` ``[T, Hkv, D]``: the new tokens, which are in the cache too.

    Not for a plan of few queries, which is `cuda.attend`'s. table: ``[R, blocks]`` int32 of these requests. overlap:
    see `driver`.
    """
    if prefill.joined:
        attend_joined(query, key, value, cache_, table, prefill, prefill.joined, workspace, flash, out, overlap)
        return
    most = prefill.most_queries
    rotated = history.turn(query, cache_) if prefill.parts else query
    _, logs = flash(query, key, value, prefill.starts, prefill.starts, most, most, True, out)
    for part in prefill.parts:
        old_key, old_value = workspace.read(cache_, table, part.pieces)
        mine = slice(part.begin, part.end)
        starts = (part.query_starts, part.key_starts)
        found = flash(rotated[mine], old_key, old_value, *starts, part.most_queries, part.most_keys, False, None)
        history.fold_into(out[mine], logs[:, mine], *found, cache_)


def attend_joined(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache_: Cache,
    table: torch.Tensor,
    prefill: Prefill,
    joined: Joined,
    workspace: Workspace,
    flash: Attend,
    out: torch.Tensor,
    overlap: bool,
) -> None:
    """As `attend`. The histories are made plain while the new tokens are rotated."""
    room = workspace.key, workspace.value
    rotated = history.turn_new(query, key, value, cache_, room, prefill.starts, joined.key_starts)
    for piece, first in joined.pieces:
        place = [x[:, first : first + piece.count] for x in room]
        history.expand_tokens(*place, cache_, table[piece.request], piece.first, piece.count, overlap)
    keys, values = (x[:, : joined.tokens].transpose(0, 1) for x in room)
    starts, most = (prefill.starts, joined.key_starts), (prefill.most_queries, joined.most_keys)
    found, _ = flash(rotated, keys, values, *starts, *most, True, None)
    history.turn_back(found, out, cache_, overlap)
