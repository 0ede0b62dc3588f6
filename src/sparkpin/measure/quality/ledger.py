"""What sound changes have cost small models, as data: docs/quality-ledger.md tells how each was measured.

The limits of stages/*.yaml follow from these rows by the rule of docs/quality.md.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from sparkpin.releases.quality_record import Figure

FILE = Path(__file__).parent / "ledger.json"


@dataclass(frozen=True)
class Cost:
    """A change against the same model without it, of all texts of `texts/`. Figures are as in `quality_record.Texts`.

    stages: those that make this change; none: a release of any stage may have it against its parent. data: the
    measurement's folder of benchmarks/ledger/data, setup and reference; "" where the tables of the ledger alone are
    left of it.
    """

    change: str
    stages: tuple[str, ...]
    model: str
    on: str
    day: str
    data: str
    kl: Figure
    top1: Figure
    ratio: Figure
    continued_kl: Figure


@functools.cache
def costs() -> tuple[Cost, ...]:
    return TypeAdapter(tuple[Cost, ...]).validate_json(FILE.read_bytes())


def of_stages(names: Iterable[str]) -> tuple[Cost, ...]:
    """The changes that a chain of stages makes, in its order; what any release may have is left out."""
    return tuple(cost for name in names for cost in costs() if name in cost.stages)
