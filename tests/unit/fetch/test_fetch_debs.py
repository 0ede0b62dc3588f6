"""Debian packages into the store, with a made-up apt: the real one is asked in tests/e2e/fetch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from stack_samples import deb, stack

from sparkpin.fetch import stack as fetch
from sparkpin.fetch.store import Store
from sparkpin.pins.schema import LockedFile


def test_each_part_that_apt_brought_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Apt:
        def download(self, wanted: Sequence[LockedFile], folder: Path, _: object) -> None:
            for row in wanted:
                (folder / row.file).write_bytes(f"{row.name} {row.version} amd64".encode())

    monkeypatch.setattr(fetch, "open_apt", lambda root, stack: Apt())
    monkeypatch.setattr(fetch, "DEBS", 2)
    wanted, store, said = [deb(name, "1") for name in "abc"], Store(tmp_path / "store"), list[str]()
    fetch.fetch_debs(stack(), wanted, store, tmp_path, said.append, str)
    assert all(store.has(row) for row in wanted)
    first, second = (line for line in said if " of 3" in line)
    assert " 2 of 3" in first and " 3 of 3" in second
