"""Which tiles the attention kernel takes: data per architecture in tuned.json, chosen once."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sparkpin_modkit.tuned import tuned_entries

OLDEST = 80
"""Compute capability, times ten: asynchronous copies need 8.0."""


@dataclass(frozen=True)
class Tuned:
    """For up to `columns` rows of queries: `tokens` of the cache make a tile; `stages` tiles are loaded ahead.

    `programs` for each multiprocessor share the work, fewer if one would get less than `share` tiles. `pairs`: the
    operand's order is SM90's, see `attend._columns`. `registers`: a limit for each thread. `overlap`: each kernel is
    launched before the one before it has ended (from SM90 on).
    """

    columns: int
    tokens: int
    warps: int
    stages: int
    programs: int
    share: int
    pairs: bool = False
    registers: int | None = None
    overlap: bool = False


def tuned_for(architecture: int) -> tuple[Tuned, ...]:
    """By columns, ascending. architecture: compute capability times ten, 121 for 12.1. Raises ModError if too old."""
    found = (Tuned(**entry) for entry in tuned_entries("turboquant", "sparkpin_turboquant", architecture, OLDEST))
    return tuple(
        sorted(
            (replace(entry, overlap=entry.overlap and architecture >= 90) for entry in found), key=lambda e: e.columns
        )
    )


def columns(rows: int) -> tuple[int, int]:
    """Rows of queries -> widths of the two products that take them; the second may be 0. Powers of two from 16 on.

    48 rows (three tokens of 16 heads) are 32 + 16: nothing is padded.
    """
    if rows <= 16:
        return 16, 0
    first = 1 << (rows.bit_length() - 1)
    if first == rows:
        return (rows, 0) if rows <= 64 else (rows // 2, rows // 2)
    rest = max(16, 1 << (rows - first - 1).bit_length())
    return (first, rest) if rest < first else (2 * first, 0) if first < 64 else (first, first)


def entry_for(rows: int, tuned: tuple[Tuned, ...]) -> Tuned:
    """The narrowest entry that holds the rows."""
    for entry in tuned:
        if entry.columns >= rows:
            return entry
    raise ValueError(f"turboquant: {rows} rows of queries, wanted at most {tuned[-1].columns}")
