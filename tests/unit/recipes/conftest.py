"""Folders of a project's copy, in which recipes and pins may be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkpin.core.paths import Paths


@pytest.fixture
def paths(project: Path, tmp_path: Path) -> Paths:
    return Paths(project, tmp_path / "cache", tmp_path / "home")
