"""Which tests `invoke test` runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from places import PROJECT

from sparkpin.cli import developer
from sparkpin.core.errors import HostError, InputError

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


@pytest.mark.parametrize(("codes", "expected"), [([0, 1], 3), ([0, 4], 4)])
def test_without_mkdocs_the_other_checks_still_count(
    codes: list[int], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(_: Path) -> int:
        raise HostError("no mkdocs")

    monkeypatch.setattr(developer, "site", missing)
    monkeypatch.setattr(developer, "run_all", lambda _: codes)
    for other in ("lint", "prose"):
        monkeypatch.setattr(developer, other, lambda _: 0)
    assert developer.check() == expected
