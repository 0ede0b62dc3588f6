"""Commands that are killed at any moment: what is there afterwards is right, and the same command again succeeds."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checkout import PROJECT
from kills import Victim

from sparkpin.core.files import PARTIAL
from sparkpin.core.paths import Paths
from sparkpin.releases.record import Release, Releases

pytestmark = pytest.mark.slow

RECIPE = "scripted-tiny"
KILLS = 10


@pytest.fixture
def paths(main_job: Releases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    """A home of our own, with the releases and checkpoints of the machine's."""
    paths = Paths(PROJECT, main_job.paths.cache, tmp_path / "home")
    for name in ("releases", "images", "inputs", "checkpoints"):
        if (main_job.paths.home / name).is_dir():
            shutil.copytree(main_job.paths.home / name, paths.home / name)
    monkeypatch.setenv("SPARKPIN_HOME", str(paths.home))
    return paths


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("task", ["promote", "rollback"])
def test_what_is_current(
    task: str, smoked: dict[str, Release], paths: Paths, record_property: Callable[[str, object], None]
) -> None:
    records, tags = Releases(paths), [smoked[stage].tag for stage in ("v2", "v2-tq")]
    first, then = (Victim(["promote", tag]) for tag in tags)
    first.done()
    then.done()
    wanted = tags[0] if task == "rollback" else tags[1]
    change, back = (Victim(["rollback", "--to", wanted]), then) if task == "rollback" else (then, first)
    for _ in change.kills(KILLS, back.done):
        assert records.current_tag(RECIPE) in tags and not records.readable(RECIPE)[1]
        change.done()
        assert records.current_tag(RECIPE) == wanted
        assert not list((paths.home / "releases" / RECIPE).glob(f"{PARTIAL}*"))
    record_property("trials", KILLS)


def test_checkpoint(paths: Paths, record_property: Callable[[str, object], None]) -> None:
    making = Victim(["build", "--checkpoint-only", "--recipe", RECIPE, "--stage", "v2-tq"])
    folder = paths.home / "checkpoints" / RECIPE
    shutil.rmtree(folder)
    making.done()
    wanted = tree(folder)
    for _ in making.kills(KILLS, lambda: shutil.rmtree(folder)):
        left = tree(folder) if folder.exists() else {}
        named = {name: data for name, data in left.items() if not name.startswith(PARTIAL)}
        assert named in ({}, wanted), "under its name a checkpoint is whole"
        making.done()
        assert tree(folder) == wanted
    record_property("trials", KILLS)
