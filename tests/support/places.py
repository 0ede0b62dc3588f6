"""Where the project's own files lie, for tests in any folder."""

from __future__ import annotations

from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
SUPPORT = PROJECT / "tests/support"
DATA = PROJECT / "tests/data"
