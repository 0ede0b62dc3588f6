"""The package index that the user has set up is the one that is asked, or nothing is."""

from __future__ import annotations

import sys
import tomllib
import venv
from pathlib import Path

import pytest
from places import PROJECT

from sparkpin.core.errors import HostError
from sparkpin.fetch.pip_settings import indexes


def test_a_python_without_pip_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `uv tool install` makes it, but for what the project depends on."""
    venv.create(tmp_path / "venv", with_pip=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv/bin/python"))
    monkeypatch.delenv("UV_DEFAULT_INDEX", raising=False)
    with pytest.raises(HostError):
        indexes()
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    assert any(row.startswith("pip>=") for row in project["dependencies"])
