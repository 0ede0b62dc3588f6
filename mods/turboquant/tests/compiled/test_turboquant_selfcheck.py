"""The self-check on the kernels' own code on a CPU: sound, and with each fault planted."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from flash_on_cpu import flash
from sparkpin_turboquant import selfcheck
from sparkpin_turboquant.formats import FORMATS
from sparkpin_turboquant.tuned import Tuned

sys.path.append(str(Path(__file__).parents[1]))

from faults import FAULTS, plant

TUNED = Tuned(warps=8, blocks=1)
KERNELS = ["store", "expand", "turn", "fold", "FlashAttention", "attend, merge"]


def failing(name: str) -> list[str]:
    """Kernels that differ, in the order of the table."""
    format = FORMATS[name]
    case = selfcheck.Case(name, 2, 4, 64, 32, format.slot_bytes(64) + 4, (1, 3), "float32")
    found = list(selfcheck.compare(case, TUNED, 2, torch.device("cpu"), partial(flash, 64**-0.5)))
    assert list(dict.fromkeys(kernel for kernel, *_ in found)) == KERNELS
    assert [case for _, case, *_ in found][-2:] == [f"{name}, 1 query tokens", f"{name}, 3 query tokens"]
    return [kernel for kernel, _, error, bound in found if not error < bound]


@pytest.mark.parametrize("name", FORMATS)
def test_sound_kernels_pass(on_cpu: None, name: str) -> None:
    assert failing(name) == []


def test_one_vector_among_many_counts() -> None:
    right = torch.ones(1000, 64)
    found = right.clone()
    found[7] *= 1.1
    assert selfcheck.worst(found, right) == pytest.approx(0.1, rel=1e-3)
    found[8, 3] = torch.nan
    assert not selfcheck.worst(found, right) < 1e9


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen_where_it_is(on_cpu: None, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is stored wrongly may not be finite, and so spoil what reads it."""
    plant(FAULTS[name], monkeypatch)
    assert failing(FAULTS[name].format)[:1] == [FAULTS[name].kernel]
