"""Commands that are killed at any moment: what is there afterwards is right, and the same command again succeeds."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from checkout import INVOKE, PROJECT

from sparkpin.core.files import PARTIAL
from sparkpin.core.paths import Paths
from sparkpin.releases.record import Releases

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


def run(line: list[str]) -> float:
    """Seconds that it took."""
    begin = time.monotonic()
    subprocess.run([*INVOKE, *line], cwd=PROJECT, check=True, capture_output=True)
    return time.monotonic() - begin


def kills(seconds: float, line: Callable[[int], list[str]]) -> Iterator[list[str]]:
    """Each command that was killed while it ran, KILLS in all, from the first third of its time to its end."""
    done, number = 0, 0
    while done < KILLS:
        number += 1
        argv = line(number)
        process = subprocess.Popen(
            [*INVOKE, *argv],
            cwd=PROJECT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        time.sleep(seconds * (0.3 + 0.6 * done / KILLS))
        if process.poll() is None:
            done += 1
            os.killpg(process.pid, signal.SIGKILL)
        else:
            seconds *= 0.9  # the machine is less busy than it was
        process.wait()
        yield argv


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_promote(paths: Paths, record_property: Callable[[str, object], None]) -> None:
    records = Releases(paths)
    tags = [records.get(stage, RECIPE).tag for stage in ("v2", "v2-tq")]
    for line in kills(run(["promote", tags[0]]), lambda number: ["promote", tags[number % 2]]):
        assert records.current_tag(RECIPE) in tags and not records.faults()
        run(line)
        assert records.current_tag(RECIPE) == line[1]
        assert not list((paths.home / "releases" / RECIPE).glob(f"{PARTIAL}*"))
    record_property("trials", KILLS)


def test_checkpoint(paths: Paths, record_property: Callable[[str, object], None]) -> None:
    line = ["checkpoint", "--recipe", RECIPE, "--stage", "v2-tq"]
    folder = paths.home / "checkpoints" / RECIPE
    seconds = []
    for _ in range(2):  # the second time with warm caches, as all that follow
        shutil.rmtree(folder)
        seconds.append(run(line))
    wanted = tree(folder)
    shutil.rmtree(folder)
    for _ in kills(seconds[-1], lambda number: line):
        left = tree(folder) if folder.exists() else {}
        named = {name: data for name, data in left.items() if not name.startswith(PARTIAL)}
        assert named in ({}, wanted), "under its name a checkpoint is whole"
        run(line)
        assert tree(folder) == wanted
        shutil.rmtree(folder)
    record_property("trials", KILLS)
