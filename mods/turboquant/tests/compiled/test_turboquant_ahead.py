"""What a server launches is what was compiled ahead."""

from __future__ import annotations

from pathlib import Path

import pytest
from sparkpin_modkit import kernels as kit
from sparkpin_turboquant import ahead, kernel
from sparkpin_turboquant.formats import FORMATS
from sparkpin_turboquant.tuned import MOST_ROWS, splits_of, tuned_for, variant_for


def test_every_variant_is_in_the_list(architecture: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "cubin_of", lambda compiled, architecture: b"")
    made, tuned = set(ahead.warm_up()), tuned_for(architecture)
    assert len(made) == 30
    for format in FORMATS.values():
        for head_dim in (64, 128, 256):
            assert kernel.Access(head_dim, format.key_bits) in made
            for group in range(1, 33):
                for queries in range(1, MOST_ROWS + 1):
                    rows = queries * group // splits_of(queries, group)
                    assert variant_for(tuned, format, head_dim, rows) in made


def test_compiled_once_then_found(monkeypatch: pytest.MonkeyPatch, architecture: int, tmp_path: Path) -> None:
    access = kernel.Access(64, 4)
    cubin = kernel.cubin_of(access, architecture)
    [kept] = kit.entries(tmp_path)
    assert kept == {"name": "cache", "key": kernel.key_of(access, architecture), "arch": architecture}
    monkeypatch.setattr(kernel, "compile_cubin", None)
    assert kernel.cubin_of(access, architecture) == cubin


def test_the_same_bytes_twice(architecture: int) -> None:
    access = kernel.Access(128, 4)
    assert kernel.compile_cubin(access, architecture) == kernel.compile_cubin(access, architecture)


def test_the_same_source_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Doubles that were iterated differ in their last digits from one processor to another: 5 of 22 keys did."""
    access = kernel.Access(64, 4)
    here = access.source()
    monkeypatch.setattr(kernel, "edges", lambda original=kernel.edges: [x * (1 + 1e-15) for x in original()])
    assert access.source() == here
