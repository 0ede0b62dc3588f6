"""What the main line fetches, and when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from places import PROJECT

from sparkpin.build import make
from sparkpin.build.pair import pair
from sparkpin.cli import build
from sparkpin.core.errors import BuildError, InputError
from sparkpin.core.paths import Paths


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done to get the stages base, hybrid and mtp, of which the last cannot be built."""
    done: list[str] = []

    def record(paths: Paths, engine: Any, pairing: Any, built: str) -> str:
        done.append(f"built {built}")
        return built

    def build_image(paths: Paths, engine: Any, image: Any) -> str:
        if image.stage == "mtp":
            raise BuildError("no space", next_step="")
        return str(image.stage)

    monkeypatch.setattr(make, "engine_of", lambda _: type("Here", (), {"platform": "linux/amd64"}))
    monkeypatch.setattr(make, "record_release", record)
    monkeypatch.setattr(make, "build_image", build_image)
    monkeypatch.setattr(make, "find_built", lambda *_: "there" in done)
    monkeypatch.setattr("sparkpin.fetch.stack.fetch_stack", lambda *args: done.append(f"fetched {args[1].name}"))
    monkeypatch.setattr(build, "ensure_attested", lambda paths, release: done.append(f"attested {release}"))
    return done


def carry_out(tmp_path: Path, **options: bool) -> None:
    paths = Paths(PROJECT, tmp_path / "cache", tmp_path / "home")
    build.carry_out(build.BuildPlan(paths, pair(PROJECT, "scripted-tiny", stage="mtp"), ()), **options)


@pytest.mark.parametrize("there", [False, True])
def test_what_is_missing_is_fetched_before_the_first_build(tmp_path: Path, happened: list[str], there: bool) -> None:
    happened += ["there"] if there else []
    with pytest.raises(BuildError):
        carry_out(tmp_path)
    first = "there" if there else "fetched cpu"
    assert happened == [first, "built base", "attested base", "built hybrid", "attested hybrid"]


def test_offline_nothing_is_built_before_it_is_known_what_is_missing(tmp_path: Path, happened: list[str]) -> None:
    with pytest.raises(InputError):
        carry_out(tmp_path, offline=True)
    assert happened == []
