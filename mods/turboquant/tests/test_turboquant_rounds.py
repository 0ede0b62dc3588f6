"""How histories are cut."""

from __future__ import annotations

import random

from sparkpin_turboquant.rounds import Piece, rounds


def test_small_histories_share_a_round() -> None:
    assert rounds([0, 3, 0, 4], 10) == ((Piece(1, 0, 3), Piece(3, 0, 4)),)


def test_a_long_one_fills_several_and_lets_the_next_begin() -> None:
    assert rounds([25, 2], 10) == (
        (Piece(0, 0, 10),),
        (Piece(0, 10, 10),),
        (Piece(0, 20, 5), Piece(1, 0, 2)),
    )


def test_nothing_cached_needs_no_round() -> None:
    assert rounds([0, 0], 10) == rounds([], 10) == ()


def test_each_token_once_and_no_round_too_large() -> None:
    random.seed(1)
    for _ in range(200):
        histories = [random.choice([0, 1, 7, 40]) * random.randint(1, 9) for _ in range(6)]
        room = random.randint(1, 50)
        cut = rounds(histories, room)
        assert all(sum(piece.count for piece in pieces) == room for pieces in cut[:-1])
        assert all(0 < sum(piece.count for piece in pieces) <= room for pieces in cut)
        assert all([p.request for p in pieces] == sorted({p.request for p in pieces}) for pieces in cut)
        seen = [(p.request, p.first + i) for pieces in cut for p in pieces for i in range(p.count)]
        assert seen == [(request, token) for request, history in enumerate(histories) for token in range(history)]
