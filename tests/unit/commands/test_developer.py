"""Which tests `invoke test` runs."""

from __future__ import annotations

from pathlib import Path

import durations
import pytest
from places import PROJECT

from sparkpin.commands import developer
from sparkpin.core.errors import InputError


def parts_of(monkeypatch: pytest.MonkeyPatch, **options: bool) -> set[str]:
    """What pytest is given of tests/."""
    given: list[str] = []
    monkeypatch.setattr(developer, "run_all", lambda project, command: given.extend(command) or 0)
    assert developer.test(PROJECT, **options) == 0
    return {word for word in given if "tests" in Path(word.removeprefix("--ignore=")).parts}


def test_the_rest_is_what_the_default_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    golden = developer.GOLDEN
    assert (PROJECT / golden).is_file()
    assert parts_of(monkeypatch) == {"tests/unit", golden}
    rest = {"tests/engine", "tests/e2e", "tests/adversary"}
    assert parts_of(monkeypatch, rest=True) == {*rest, f"--ignore={golden}"}
    assert parts_of(monkeypatch, fast=True) == {"tests/unit"} and parts_of(monkeypatch, whole=True) == {"tests"}
    found = {f"tests/{path.relative_to(PROJECT / 'tests').parts[0]}" for path in (PROJECT / "tests").rglob("test_*.py")}
    assert found <= {"tests/unit", *rest}


def test_more_than_one_part_is_refused() -> None:
    with pytest.raises(InputError):
        developer.test(PROJECT, fast=True, rest=True)


def test_the_files_that_take_long_are_there() -> None:
    """One that has moved would start last, and the other workers would wait for it."""
    assert [file for file in durations.LONG if not (PROJECT / "tests" / file).is_file()] == []
