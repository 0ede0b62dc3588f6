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


def test_what_weighs_more_for_pip_weighs_more_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's file, the user's, its section for `pip download`, and the environment."""
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX", "PIP_INDEX_URL", "PIP_CONFIG_FILE", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    for variable, folder in (("XDG_CONFIG_DIRS", "etc"), ("XDG_CONFIG_HOME", "home")):
        (tmp_path / folder / "pip").mkdir(parents=True)
        monkeypatch.setenv(variable, str(tmp_path / folder))
    machine, user = (tmp_path / folder / "pip/pip.conf" for folder in ("etc", "home"))
    machine.write_text("[global]\nindex-url = http://machine/\nextra-index-url = http://more/\n")
    assert indexes()["UV_DEFAULT_INDEX"] == "http://machine/"
    user.write_text("[global]\nindex-url = http://user/\n")
    assert indexes()["UV_DEFAULT_INDEX"] == "http://user/"
    user.write_text("[download]\nindex-url = http://download/\n[global]\nindex-url = http://user/\n")
    assert indexes()["UV_DEFAULT_INDEX"] == "http://download/"
    monkeypatch.setenv("PIP_INDEX_URL", "http://environment/")
    found = indexes()
    assert (found["UV_DEFAULT_INDEX"], found["UV_INDEX"]) == ("http://environment/", "http://more/")
