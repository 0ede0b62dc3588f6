"""Which part of which history is expanded when, so that never more than a bounded number of tokens is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """Tokens `first` to ``first + count`` of the history of request number `request`."""

    request: int
    first: int
    count: int


Round = tuple[Piece, ...]
"""In ascending order of requests, at most one piece of each."""


def rounds(histories: Sequence[int], room: int) -> tuple[Round, ...]:
    """Cut histories, given in tokens for each request, into rounds of at most `room` tokens, each but the last full."""
    found: list[Round] = []
    pieces: list[Piece] = []
    left = room
    for request, history in enumerate(histories):
        first = 0
        while first < history:
            count = min(left, history - first)
            pieces.append(Piece(request, first, count))
            first += count
            left -= count
            if not left:
                found.append(tuple(pieces))
                pieces, left = [], room
    if pieces:
        found.append(tuple(pieces))
    return tuple(found)
