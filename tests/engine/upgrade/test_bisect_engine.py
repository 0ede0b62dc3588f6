"""The search over images of a made-up project, built by a real engine. Only the root file system is replaced."""

from __future__ import annotations

import dataclasses
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_images
from private_engine import remove_built

from sparkpin.build import make, rootfs
from sparkpin.build.pair import pair
from sparkpin.cli import upgrade
from sparkpin.core.paths import Paths
from sparkpin.host.engine import Engine
from sparkpin.measure import own_server as measuring
from sparkpin.releases.record import Release, Releases
from sparkpin.smoke.server import LABEL, owner
from sparkpin.upgrade.bisect_check import Check
from sparkpin.upgrade.bisect_plan import BisectPlan
from sparkpin.upgrade.bisect_search import Trial

pytest_plugins = ["fake_release"]

CHILD = (
    'FROM {{ parent_ref }} AS test\nRUN ["/bin/sh", "-c", "test $GREETING = bye && echo ok >/tmp/ok"]\n'
    + tiny_images.CHILD.replace("COPY wheels", "COPY --from=test /tmp/ok /opt/ok\nCOPY wheels")
)
"""Can be built only on a base that says bye."""
ASK = f"""{sys.executable} -c '
import http.client, os, sys
connection = http.client.HTTPConnection(os.environ["SPARKPIN_ENDPOINT"].removeprefix("http://"), timeout=600)
connection.request("POST", "/v1/completions", b"{{}}")
status = connection.getresponse().status
print("HTTP", status)
sys.exit(status != 200)'"""
CHECK = 'docker run --rm --network none "$SPARKPIN_IMAGE" /bin/sh -c "test ! -e /opt/ok"'


def made(paths: Paths, name: str) -> Release:
    with make.at_work(paths) as engine:
        return list(make.build_releases(paths, engine, pair(paths.project, name)))[-1]


@pytest.fixture
def releases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Paths, Release, Release]]:
    """Good and bad: both templates and a mod differ. The checkout is neither; a search must not touch it."""
    name = f"test{uuid.uuid4().hex[:8]}"
    paths = tiny_images.whole(tmp_path, name, name.encode())
    project = paths.project
    tar = tiny_images.make_rootfs(tmp_path / "rootfs.tar")
    monkeypatch.setattr(rootfs, "build_rootfs", lambda *args: tar)
    monkeypatch.setattr(Paths, "from_env", lambda: paths)
    good = made(paths, name)
    tiny_images.write(project / "dockerfiles/base.j2", tiny_images.BASE.replace("GREETING=hello", "GREETING=bye"))
    tiny_images.write(project / "dockerfiles/child.j2", CHILD)
    tiny_images.write(project / "mods/hello/sparkpin_hello/__init__.py", '"""Made up."""\nVALUE = 2\n')
    bad = made(paths, name)
    (project / "dockerfiles/child.j2").write_text("FROM nowhere\n")
    yield paths, good, bad
    remove_built(Engine.connect(), paths, name)


def test_two_changes_of_which_one_needs_the_other(
    releases: tuple[Paths, Release, Release], capsys: pytest.CaptureFixture[str]
) -> None:
    """One template alone fails in the build, which is no verdict; the mod has nothing to do with it."""
    paths, good, bad = releases
    before = {path: path.read_bytes() for path in paths.project.rglob("*") if path.is_file()}
    upgrade.bisect(paths, good=good.tag, bad=bad.tag, check=CHECK, serve=False)
    text = capsys.readouterr().out
    found = text[text.index("the check fails") :]
    assert [line for line in found.splitlines() if line.startswith("  ~ ")] == [
        "  ~ file dockerfiles/base.j2",
        "  ~ file dockerfiles/child.j2",
    ]
    assert before == {path: path.read_bytes() for path in paths.project.rglob("*") if path.is_file()}
    known = Releases(paths).all()
    assert {release.tag for release in known if release.stage == "two"} == {good.tag, bad.tag}  # no trial has a record
    moving = Engine.connect().image(f"sparkpin/{bad.recipe}:two")
    assert moving and moving.config_digest == bad.image


def test_a_server_for_each_trial(
    paths: Paths,
    fake_engine: Engine,
    release: Release,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A server that only plays vLLM, in a real container; it has no checkpoint to make."""
    monkeypatch.setattr(measuring, "checkpoint_of", lambda *_: checkpoint)
    fault, other = "variable FAKE_VLLM", "variable NOISE"
    bad = dataclasses.replace(release, env={"FAKE_VLLM": "completions-500", "NOISE": "1"})

    def attempt(plan: BisectPlan, chosen: str, name: str) -> Trial:
        return Check(ASK, serve=True).judge(paths, plan.combine([chosen]), tmp_path / f"{name}.log")

    plan = BisectPlan(paths, release, bad, {fault: "", other: ""})
    assert attempt(plan, other, "other").verdict == "good"
    assert attempt(plan, fault, "fault") == Trial(verdict="bad", how="exit code 1: HTTP 500")
    assert b"version 0.32.0" in (tmp_path / "other-server.log").read_bytes()
    dead = dataclasses.replace(plan, bad=dataclasses.replace(release, env={"FAKE_VLLM": "exit"}))
    made = attempt(dead, fault, "dead")
    assert (made.verdict, made.started) == ("unresolved", False)
    assert "RuntimeError: no such architecture" in (tmp_path / "dead.log").read_text()
    assert not fake_engine.client.containers.list(all=True, filters={"label": f"{LABEL}={owner(paths)}"})
