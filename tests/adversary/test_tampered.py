"""A home that somebody has written to by hand: nothing of it runs, and nothing of it becomes current. Besides,
rollbacks that are killed.

The images, records and checkpoints are those of the main job, under the name of a recipe of the tests' own; the engine
is the machine's. A trial is one change of the home with one of these commands.
"""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE, STDOUT

import pytest
from checkout import INVOKE, PROJECT
from tampers import MENDED, RUN
from typed import typed

from sparkpin.build import consistent
from sparkpin.core.files import PARTIAL
from sparkpin.core.paths import Paths
from sparkpin.core.tags import tag_of
from sparkpin.host.engine import Engine, engine_of
from sparkpin.releases.container import HOME_LABEL
from sparkpin.releases.record import Release, Releases
from sparkpin.smoke.server import LABEL, owner

RECIPE = f"tampered-{uuid.uuid4().hex[:8]}"
COMMANDS = ("promote", "rollback", "serve", "smoke", "verify", "bench", "quality", "bisect")
LINES = {command: f"{command} {{}}" for command in COMMANDS} | {
    "rollback": f"rollback --recipe {RECIPE}",
    "verify": "verify {} --sign",
    "bench": "bench {} --quick",
    "quality": "quality {} --quick",
    "bisect": "bisect --good {other} --bad {} --check true",
}
REFUSED = (2, 4, 5, 9)  # InputError (of another stack), ManifestError, IntegrityError, CheckpointError


@pytest.fixture(scope="module")
def engine(main_job: Releases) -> Engine:
    return engine_of(main_job.paths)


@pytest.fixture(scope="module")
def home(
    stages: dict[str, Release], main_job: Releases, engine: Engine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """Of which each trial gets a copy."""
    home = tmp_path_factory.mktemp("tampered") / "home"
    for part in (main_job.paths.images, main_job.paths.inputs, main_job.paths.checkpoints):
        shutil.copytree(part, home / part.name)
    records = Releases(Paths(main_job.paths.project, home, home))
    tags: list[str] = []
    for release in stages.values():
        tags.append(tag_of(RECIPE, release.stage, release.key))
        engine.tag(release.tag, tags[-1])
        records.save(dataclasses.replace(release, recipe=RECIPE, tag=tags[-1], state="passed"))
    yield home
    for tag in tags:
        engine.untag(tag)


@pytest.fixture
def paths(home: Path, tmp_path: Path, main_job: Releases, monkeypatch: pytest.MonkeyPatch) -> Paths:
    """v2-tq is current; what is tampered with is `v2`, to which a rollback would go."""
    paths = Paths(main_job.paths.project, tmp_path / "cache", tmp_path / "home")
    shutil.copytree(home, paths.home)
    monkeypatch.setenv("SPARKPIN_CACHE", str(paths.cache))
    monkeypatch.setenv("SPARKPIN_HOME", str(paths.home))
    records = Releases(paths)
    for stage in ("v2", "v2-tq"):
        records.point(records.get(stage, RECIPE))
    return paths


def ran(paths: Paths, engine: Engine) -> list[str]:
    """Containers that were made for this home; they are removed."""
    labels = (f"{HOME_LABEL}={paths.home}", f"{LABEL}={owner(paths)}")
    made = [c for label in labels for c in engine.client.containers.list(all=True, filters={"label": label})]
    for container in made:
        container.remove(force=True, v=True)
    return [str(container.name) for container in made]


def test_the_control_is_taken(paths: Paths, engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    victim = Releases(paths).get("v2", RECIPE)
    top = Releases(paths).get("v2-tq", RECIPE)
    for line in (
        f"promote {victim.tag}",
        f"promote {victim.tag} --deep",
        f"promote {top.tag}",
        LINES["rollback"],
    ):
        code, _, err = typed(line, capsys)
        assert code == 0, err
    assert Releases(paths).current_tag(RECIPE) == victim.tag


@pytest.mark.parametrize("tamper", [*RUN, *MENDED])
def test_what_was_tampered_with_neither_runs_nor_becomes_current(
    paths: Paths,
    engine: Engine,
    tamper: str,
    capsys: pytest.CaptureFixture[str],
    record_property: Callable[[str, object], None],
) -> None:
    records = Releases(paths)
    victim, top = (records.get(stage, RECIPE) for stage in ("v2", "v2-tq"))
    (RUN | MENDED)[tamper](paths, victim)
    commands = COMMANDS if tamper in RUN else ("promote", "rollback")
    record_property("trials", len(commands))
    for command in commands:
        code, out, err = typed(LINES[command].format(victim.tag, other=top.tag), capsys)
        over = command == "rollback" and code == 0 and "passed over" in err and victim.name in err
        came_through = bool(ran(paths, engine)) or records.current_tag(RECIPE) == victim.tag
        came_through |= (paths.home / "bisect").exists()  # where a search writes down what it tries
        came_through |= not over and not (code in REFUSED and "next: " in err)
        assert not came_through, f"{command}: {code}: {out}{err}"
        records.point(top)  # a rollback went further back


def test_a_rollback_that_is_killed_while_it_serves(
    paths: Paths, engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing that is current has changed, and the same command again goes to the same release."""
    records = Releases(paths)
    victim, top = (records.get(stage, RECIPE) for stage in ("v2", "v2-tq"))
    left = records.promotions_path(RECIPE).with_name(f"{PARTIAL}of-a-killed-promote")
    left.write_text("{")
    line = [*INVOKE, *LINES["rollback"].split(), "--serve"]
    process = subprocess.Popen(line, cwd=PROJECT, stdout=PIPE, stderr=STDOUT, text=True)
    label = {"label": f"{HOME_LABEL}={paths.home}"}
    while not engine.client.containers.list(all=True, filters=label, ignore_removed=True):
        assert process.poll() is None
        time.sleep(0.002)
    process.kill()
    out, _ = process.communicate(timeout=600)
    ran(paths, engine)
    assert process.returncode and records.current_tag(RECIPE) == top.tag, out
    code, _, err = typed(LINES["rollback"], capsys)
    assert code == 0 and records.current_tag(RECIPE) == victim.tag and not left.exists(), err


def test_without_the_check_it_would_become_current(
    paths: Paths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """So the trials above can fail."""
    victim = Releases(paths).get("v2", RECIPE)
    RUN["a flag more"](paths, victim)
    monkeypatch.setattr(consistent, "require_consistent", lambda *_, **__: [])
    for line in (LINES["rollback"], f"promote {victim.tag}"):
        code, _, err = typed(line, capsys)
        assert code == 0, err
        assert Releases(paths).current_tag(RECIPE) == victim.tag
