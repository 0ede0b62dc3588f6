"""Shared parts of the tests: the checkout, a small project to break, the real engine."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]
DATA = ("pins", "stages", "recipes", "dockerfiles")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the project's data files, to edit and break; mods/ holds the sources."""
    copy = tmp_path / "project"
    for name in DATA:
        shutil.copytree(PROJECT / name, copy / name)
    shutil.copytree(PROJECT / "mods", copy / "mods", ignore=shutil.ignore_patterns("__pycache__", "tests"))
    return copy
