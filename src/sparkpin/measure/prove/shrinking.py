"""The shortest session that shows a difference, found by leaving out. Pure: who asks the server is handed in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def fewer(steps: Sequence[T], shows: Callable[[list[T]], bool], tries: int) -> tuple[list[T], int]:
    """Leave out halves, quarters, ... and single steps while what is left shows it; the last step always stays.

    Returns the steps that are left, and how many of the tries. `steps` shows it: it is not asked again.
    """
    left, size = list(steps), max(1, (len(steps) - 1) // 2)
    while tries and len(left) > 1:
        place, shorter = 0, False
        while place < len(left) - 1 and tries:
            trial = [*left[:place], *left[min(place + size, len(left) - 1) :]]
            tries -= 1
            if shows(trial):
                left, shorter = trial, True
            else:
                place += size
        if size == 1 and not shorter:
            break
        size = max(1, size // 2)
    return left, tries


def cut(length: int, shows: Callable[[int, int], bool], tries: int, least: int) -> tuple[list[tuple[int, int]], int]:
    """Cut ranges out of a prompt of `length` tokens, large ones first, while what is left shows the difference.

    shows(begin, end): asks with this range left out of what is left so far; where it shows, the range stays out.
    """
    gone, size = list[tuple[int, int]](), length // 2
    while tries and size >= least:
        begin, shorter = 0, False
        while begin + size < length and tries:  # never the end, where the answer begins
            tries -= 1
            if shows(begin, begin + size):
                gone.append((begin, begin + size))
                length, shorter = length - size, True
            else:
                begin += size
        if not shorter or size > length // 2:
            size //= 2
    return gone, tries
