"""How far one server's next-token distributions are from another's, of which each tells only the likeliest tokens.

A server gives the log-probabilities of its `top` likeliest tokens and of the token that follows, of a vocabulary of
250,000. So the Kullback-Leibler divergence is bounded from below, by the data processing inequality: tokens are put
into buckets whose probabilities are known on both sides, or chosen as the release's best case:

    each token that both name                              its two probabilities
    all that the reference names and the release does not  the reference's sum; of the release at most as many times
                                                           its `top`-th probability, and at most what it did not name
    all others, as one bucket                              what is left on both sides
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkpin.smoke.logprobs import Row

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]
TOP = 20  # log-probabilities at a position: what vLLM allows at most, unless --max-logprobs says otherwise
LEAST = -100.0  # log-probabilities below say no more; vLLM writes -9999 for minus infinity
FARTHEST = 20.0  # nats: of an answer from one that has no token at all
TINY = 1e-10  # of a bucket: probabilities come as 32-bit logarithms
NONE = -1  # the id where a row has fewer entries


@dataclass(frozen=True)
class Rows:
    """What a server said at each of N positions. ids, logprobs: [N, K], the likeliest first, filled up with NONE and
    LEAST; tokens, chosen: [N], the token that follows and its log-probability.
    """

    ids: Ints
    logprobs: Floats
    tokens: Ints
    chosen: Floats

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, places: slice) -> Rows:
        return Rows(self.ids[places], self.logprobs[places], self.tokens[places], self.chosen[places])


def rows_of(rows: Sequence[Row]) -> Rows:
    """Equals go by their id."""
    width = max((len(named) for _, named in rows), default=1)
    ids = np.full((len(rows), width), NONE, np.int32)
    logprobs = np.full((len(rows), width), LEAST)
    for place, (_, named) in enumerate(rows):
        ranked = sorted(named.items(), key=lambda pair: (-pair[1], pair[0]))
        ids[place, : len(ranked)] = [token for token, _ in ranked]
        logprobs[place, : len(ranked)] = [max(value, LEAST) for _, value in ranked]
    chosen = np.array([max(named[token], LEAST) for token, named in rows], np.float64)
    return Rows(ids, logprobs, np.array([token for token, _ in rows], np.int32), chosen)


def kl(reference: Rows, release: Rows, top: int) -> Floats:
    """[N], nats: at least so much is KL(reference || release) at each position. top: how many were asked for."""
    same = (reference.ids[:, :, None] == release.ids[:, None, :]) & (reference.ids[:, :, None] != NONE)
    both = same.any(axis=2)
    there = np.take_along_axis(release.logprobs, same.argmax(axis=2), axis=1)
    named = reference.ids != NONE
    p = np.where(named, np.exp(reference.logprobs), 0.0)
    q = np.where(release.ids != NONE, np.exp(release.logprobs), 0.0)
    shared = np.where(both, p * (reference.logprobs - there), 0.0).sum(axis=1)
    left = np.clip(1 - np.where(both, np.exp(there), 0.0).sum(axis=1), 0, None)  # of the release, outside of the shared
    unshared = np.where(named & ~both, p, 0.0).sum(axis=1)
    others = np.clip(1 - p.sum(axis=1), 0, None)
    # The smallest of the `top` likeliest; a row may hold one more, the token that follows.
    least = np.exp(release.logprobs[:, min(top, release.logprobs.shape[1]) - 1])
    most = np.minimum((named & ~both).sum(axis=1) * least, np.clip(1 - q.sum(axis=1), 0, None))
    even = left * unshared / np.maximum(unshared + others, TINY)
    given = np.minimum(even, most)
    found = shared + part(unshared, given) + part(others, left - given)
    return np.asarray(np.clip(found, 0, None))


def part(p: Floats, q: Floats) -> Floats:
    """p log(p / q) of a bucket; nothing where p is nothing."""
    return np.asarray(np.where(p > TINY, p * np.log(np.maximum(p, TINY) / np.maximum(q, TINY)), 0.0))


def agreement(reference: Rows, release: Rows) -> NDArray[Any]:
    """[N], whether both have the same likeliest token."""
    return np.asarray(reference.ids[:, 0] == release.ids[:, 0])


def until_they_part(reference: Rows, release: Rows) -> tuple[int, int]:
    """Of two greedy continuations of one text: positions whose distributions can be compared, since all before them is
    the same, and how many tokens are the same.
    """
    shorter = min(len(reference), len(release))
    differ = np.flatnonzero(reference.tokens[:shorter] != release.tokens[:shorter])
    same = int(differ[0]) if len(differ) else shorter
    return min(same + 1, shorter), same


def distance(one: Rows, other: Rows) -> float:
    """sqrt(2 KL) in nats, the KL averaged over the tokens until the two part: of small differences it is about their
    standard deviation. Rows of answers to the same prompt."""
    count, _ = until_they_part(one, other)
    if not count:
        return 0.0 if len(one) == len(other) else FARTHEST
    return float(np.sqrt(2 * kl(one[:count], other[:count], TOP).mean()))
