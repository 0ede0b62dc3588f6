"""What a rebuild says and leaves behind. tests/engine/build/test_reproduce.py has whole ones."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sparkpin.build import reproduce
from sparkpin.build.record import BuildRecord, layer_file
from sparkpin.core.errors import HostError
from sparkpin.core.paths import Paths
from sparkpin.image.listing import PathEntry, write_contents


def test_what_differs_is_told_field_by_field(tmp_path: Path) -> None:
    paths = Paths(tmp_path / "project", tmp_path / "cache", tmp_path / "home")

    def side(name: str, mode: int, *more: str) -> tuple[Paths, BuildRecord]:
        """An image of one layer: a file of this mode, and empty ones."""
        entries = [PathEntry("a", "file", mode, 0, 0, 1, name * 64), *(PathEntry(n, "file", 0, 0, 0, 0) for n in more)]
        diff_id = f"sha256:{name * 64}"
        write_contents(layer_file(paths, diff_id), entries)
        return paths, cast(Any, SimpleNamespace(config=f'{{"User": "{name}"}}', diff_ids=[diff_id]))

    first, second = side("1", 0o644, "gone"), side("2", 0o600, "odd")
    settings = ['configuration: - "User": "1"', 'configuration: + "User": "2"']
    files = ["only in the recorded image: /gone", "only in the image built now: /odd"]
    fields = ["/a: mode 0644 -> 0600", f"/a: content {'1' * 64} -> {'2' * 64}"]
    assert sorted(reproduce.differences(first, second)) == sorted(settings + files + fields)
    lost = layer_file(paths, first[1].diff_ids[0])
    lost.unlink()
    *settings_left, last = reproduce.differences(first, second)
    assert settings_left == settings and str(lost) in last


def test_only_root_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is fetched; with the command that does it."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(HostError) as caught:
        reproduce.reproduce(cast(Any, None), cast(Any, SimpleNamespace(tag="t")))
    assert "invoke reproduce t" in caught.value.next_step


def test_a_name_in_tmp_that_somebody_else_made_again_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    left = Path(tempfile.mkdtemp(dir=tmp_path))
    link = Path("/tmp", left.name)
    link.symlink_to(tmp_path / "precious")
    try:
        reproduce.remove_run(left)
        assert (tmp_path / "precious").is_dir() and not left.exists()
    finally:
        link.unlink()
