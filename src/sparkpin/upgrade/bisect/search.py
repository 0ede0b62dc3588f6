"""Delta debugging: the smallest set of changes that turns a verdict. Pure.

A. Zeller, R. Hildebrandt: Simplifying and Isolating Failure-Inducing Input, IEEE Transactions on Software Engineering
28(2), 2002: `ddmin`. Groups of changes first, then single ones, after G. Misherghi, Z. Su: HDD: Hierarchical Delta
Debugging, ICSE 2006.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from typing import Literal, TypeVar

Verdict = Literal["good", "bad", "unresolved"]
T = TypeVar("T")
Test = Callable[[tuple[T, ...]], Verdict]
"""The verdict on the good side with some of the changes, which keep their order."""


def minimal(groups: Sequence[Sequence[T]], test: Test[T]) -> tuple[T, ...]:
    """Changes that are bad together, of which none can be left out: without any one of them the test is good or
    unresolved.

    groups: all changes, those of a kind together; all of them at once are known to be bad, none of them to be good.
    A group that is not needed goes as a whole.
    """

    def flat(some: Sequence[Sequence[T]]) -> tuple[T, ...]:
        return tuple(chain.from_iterable(some))

    guilty = ddmin([group for group in groups if group], lambda some: test(flat(some)))
    return ddmin(flat(guilty), test)


def ddmin(changes: Sequence[T], test: Test[T]) -> tuple[T, ...]:
    """As in the article; `changes` themselves are known to be bad.

    At most n*n + 3n tests of n changes, about 2 log2(n) where one change alone is to blame.
    """
    left, parts = tuple(changes), 2
    while len(left) > 1:
        pieces = split(left, parts)
        rests = [tuple(one for one in left if one not in piece) for piece in pieces] if parts > 2 else []
        if (piece := first_bad(pieces, test)) is not None:
            left, parts = piece, 2
        elif (rest := first_bad(rests, test)) is not None:
            left, parts = rest, max(parts - 1, 2)
        elif parts >= len(left):
            break
        else:
            parts = min(2 * parts, len(left))
    return left


def first_bad(some: Sequence[tuple[T, ...]], test: Test[T]) -> tuple[T, ...] | None:
    return next((one for one in some if test(one) == "bad"), None)


def split(changes: tuple[T, ...], parts: int) -> list[tuple[T, ...]]:
    """In as many pieces of nearly the same length; the first are the shorter ones."""
    ends = [len(changes) * place // parts for place in range(parts + 1)]
    return [changes[start:end] for start, end in pairwise(ends)]
