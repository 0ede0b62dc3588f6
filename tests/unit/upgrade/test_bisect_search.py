"""Delta debugging alone: what is found is bad, and no part of it can be left out."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from sparkpin.upgrade.bisect_search import ddmin, minimal

Check = Callable[[tuple[int, ...]], bool]


def counted(check: Check) -> tuple[Check, list[tuple[int, ...]]]:
    tried: list[tuple[int, ...]] = []

    def test(chosen: tuple[int, ...]) -> bool:
        tried.append(chosen)
        return check(chosen)

    return test, tried


def needs(*wanted: int) -> Check:
    return lambda chosen: set(wanted) <= set(chosen)


@pytest.mark.parametrize(
    ("size", "guilty", "most"),
    [
        *((64, (one,), 2 * 6) for one in (0, 13, 63)),  # by halving
        *((8, together, 88) for together in ((1, 6), (0, 3, 7), tuple(range(8)))),
        (9, (1, 7, 8), 108),  # Zeller and Hildebrandt, example 3
    ],
)
def test_what_is_to_blame_is_found(size: int, guilty: tuple[int, ...], most: int) -> None:
    test, tried = counted(needs(*guilty))
    assert ddmin(range(size), test) == guilty
    assert len(tried) <= most


def test_any_result_is_minimal() -> None:
    """Against chance: verdicts without any order, as where some changes cannot be made without others. Every single
    change is needed; the number of trials is bounded."""
    rng = random.Random(7)
    for size, _ in itertools.product((2, 3, 5, 6), range(60)):
        everything = tuple(range(size))
        subsets = [some for count in range(size + 1) for some in itertools.combinations(everything, count)]
        is_bad = {some: rng.random() < 1 / 3 for some in subsets} | {(): False, everything: True}
        test, tried = counted(is_bad.__getitem__)
        found = ddmin(everything, test)
        assert is_bad[found]
        assert not any(is_bad[tuple(one for one in found if one != left)] for left in found)
        assert len(tried) <= size * size + 3 * size


def test_groups_go_as_a_whole_and_the_first_are_tried_first() -> None:
    """Eighty wheels stay as they are when one of three flags is to blame: no trial makes some of them."""
    flags, wheels = [0, 1, 2], list(range(100, 180))
    test, tried = counted(needs(1))
    assert minimal([flags, [], wheels], test) == (1,)
    assert all(set(wheels) <= set(chosen) or not set(wheels) & set(chosen) for chosen in tried)
    assert tried[0] == (0, 1, 2)
    assert minimal([[0, 1, 2], [10, 11], [20]], needs(2, 11)) == (2, 11)
