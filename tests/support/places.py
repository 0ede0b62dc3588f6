"""Where the project's own files lie, for tests in any folder."""

from __future__ import annotations

import shutil
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
SUPPORT = PROJECT / "tests/support"
DATA = PROJECT / "tests/data"
WEIGHTS = "*.safetensors"  # 47 MB, which a copy for each test would add up
NO_ENGINE = "no-engine"  # the socket that unit tests are given for Docker's


def copied_to(copy: Path) -> Path:
    """The project's data files, to edit and break, but no weights; mods/ holds the sources."""
    for name in ("pins", "stages", "recipes", "dockerfiles"):
        shutil.copytree(PROJECT / name, copy / name, ignore=shutil.ignore_patterns(WEIGHTS))
    shutil.copytree(PROJECT / "mods", copy / "mods", ignore=shutil.ignore_patterns("__pycache__", "tests"))
    return copy
