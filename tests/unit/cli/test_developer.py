"""Which tests `invoke test` runs."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from places import PROJECT

from sparkpin.cli import developer
from sparkpin.core.errors import InputError

UNIT, REAL = {"tests/unit"}, {"tests/engine", "tests/e2e", "tests/adversary"}


def given(monkeypatch: pytest.MonkeyPatch, **options: bool | str) -> list[str]:
    """All that pytest is given."""
    words: list[str] = []
    monkeypatch.setattr(developer, "run_all", lambda parts: [words.extend(part) or 0 for part in parts])
    assert developer.test(**options) == 0
    return words


def folders(words: list[str]) -> set[str]:
    return {word for word in words if Path(word).parts[0] == "tests"}


def test_each_part_has_its_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = given(monkeypatch, fast=True)
    assert folders(fast) == UNIT and "mods/guard/tests" in fast
    usual, every = given(monkeypatch), given(monkeypatch, all=True)
    assert folders(usual) == folders(every) == UNIT | REAL
    assert "not slow" in usual and "not slow" not in every
    found = {f"tests/{path.relative_to(PROJECT / 'tests').parts[0]}" for path in (PROJECT / "tests").rglob("test_*.py")}
    assert found == UNIT | REAL
    with pytest.raises(InputError):
        developer.test(fast=True, all=True)


def test_each_check_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last as much as the first; what is not installed has a code of its own."""
    asked = list[list[str]]()

    def codes(commands: list[list[str]]) -> list[int]:
        asked.extend(commands)
        return [3 if command[1] == ".ci/site.py" else command[1] == ".ci/prose.py" for command in commands]

    monkeypatch.setattr(developer, "run_all", codes)
    monkeypatch.setattr(developer, "lint", lambda _: 0)
    assert developer.check() == 3
    scripts = {words[1] for words in asked if str(words[1]).startswith(".ci/")}
    assert scripts == {".ci/prose.py", ".ci/site.py"} and all((PROJECT / script).is_file() for script in scripts)
    monkeypatch.setattr(developer, "run_all", lambda _: [0])
    monkeypatch.setattr(developer, "lint", lambda _: 1)
    assert developer.check() == 1


def test_what_a_page_of_the_site_lacks_is_found(tmp_path: Path) -> None:
    (tmp_path / "here.css").touch()
    page = '<link href="here.css"><script src="gone.js"></script><img src="https://elsewhere/x.png">'
    for name in ("index.html", "404.html"):  # whose paths begin with a slash
        (tmp_path / name).write_text(page, encoding="utf-8")
    assert len([*runpy.run_path(str(PROJECT / ".ci/site.py"))["asset_faults"](tmp_path)]) == 2
