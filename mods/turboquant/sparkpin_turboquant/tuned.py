"""Which tiles the attention kernel takes: data per architecture in tuned.json, chosen once."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sparkpin_modkit.tuned import tuned_entries

OLDEST = 80
"""Compute capability, times ten: asynchronous copies need 8.0."""


@dataclass(frozen=True)
class Tuned:
    """For up to `columns` rows of queries: blocks of `warps`, `blocks` of them on a multiprocessor; head size 256.

    Smaller heads take fewer warps and more blocks. They share the work, fewer if one would get less than `share` tiles. `overlap`: the merging kernel is
    launched before the one before it has ended (from SM90 on).
    """

    columns: int
    warps: int
    blocks: int
    share: int = 1
    overlap: bool = False


def tuned_for(architecture: int) -> tuple[Tuned, ...]:
    """By columns, ascending. architecture: compute capability times ten, 121 for 12.1. Raises ModError if too old."""
    found = (Tuned(**entry) for entry in tuned_entries("turboquant", "sparkpin_turboquant", architecture, OLDEST))
    return tuple(
        sorted(
            (replace(entry, overlap=entry.overlap and architecture >= 90) for entry in found), key=lambda e: e.columns
        )
    )


def entry_for(rows: int, tuned: tuple[Tuned, ...]) -> Tuned:
    """The narrowest entry that holds the rows."""
    for entry in tuned:
        if entry.columns >= rows:
            return entry
    raise ValueError(f"turboquant: {rows} rows of queries, wanted at most {tuned[-1].columns}")
