"""An engine that each test finds empty, and the state folders of a machine that knows nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from carried_release import Source
from empty_engine import empty_engine as empty
from empty_engine import own_engine

from sparkpin.core.paths import Paths

__all__ = ["empty", "own_engine"]  # fixtures


@pytest.fixture
def paths(source: Source, tmp_path: Path) -> Paths:
    return source.elsewhere(tmp_path)
