"""What a rebuild leaves behind. tests/engine/build/test_reproduce.py has whole ones."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from recorded import Site, sha

from sparkpin.build import reproduce
from sparkpin.build.record import layer_file, records_of
from sparkpin.core.errors import HostError


def test_what_differs_is_told_field_by_field(tmp_path: Path) -> None:
    site = Site.make(tmp_path)
    first, second = (records_of(site.paths, release)[0] for release in (site.first(), site.second()))
    lines = [*reproduce.differences((site.paths, first), (site.paths, second))]
    assert "/etc/passwd: mode 0644 -> 0600" in lines
    assert f"/usr/bin/dash: content {sha('shell')} -> {sha('new shell')}" in lines
    assert any(line.startswith("only in the image built now: /etc/odd") for line in lines)
    layer_file(site.paths, first.diff_ids[0]).unlink()
    *settings, last = reproduce.differences((site.paths, first), (site.paths, second))
    assert all(line.startswith("configuration: ") for line in settings) and str(tmp_path) in last


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
