"""What a rebuild leaves behind. tests/engine/build/test_reproduce.py has whole ones."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sparkpin.build import reproduce
from sparkpin.core.errors import HostError


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
