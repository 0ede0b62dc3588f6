"""`up` tests the end of a chain first and serves it, then the stage below it, with real servers; nothing is lost."""

from __future__ import annotations

import json
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkout import Checkout
from places import PROJECT
from watched import free_port

from sparkpin.core.paths import Paths
from sparkpin.host.engine import Engine
from sparkpin.releases.record import Releases

pytestmark = pytest.mark.slow

TRIAL = f"order-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[Checkout]:
    made = Checkout.make(tmp_path / "copy")
    made.add_recipe(TRIAL)
    made.replace(f"recipes/{TRIAL}.yaml", "port: 8000", f"port: {free_port()}")
    made.ask_only("completion", "long-text", "drift", "mods")  # test_golden.py has all of them, of each stage
    shutil.copytree(Paths.from_env(PROJECT).images, made.home / "images")  # the images are there
    yield made
    made.invoke("stop", "--recipe", TRIAL)
    made.remove_built(TRIAL)


def test_the_end_is_tested_first_and_current_before_the_first_stage_is_tested(copy: Checkout) -> None:
    done = copy.invoke("up", "--recipe", TRIAL, "--stage", "mtp", "--serve")
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stderr
    base = said.index(f"smoke test 3 of 3: sparkpin/{TRIAL}:base-")
    (current,) = re.finditer(rf"sparkpin/{TRIAL}:mtp-\w+ is the first release that passed", said)
    assert said.index(f"smoke test 1 of 3: sparkpin/{TRIAL}:mtp-") < current.start() < base
    records = Releases(Paths(copy.folder, copy.home, copy.home))
    releases = {release.stage: release for release in records.of_recipe(TRIAL)}
    (served,) = [one for one in json.loads(copy.done("status", "--json")) if one["recipe"] == TRIAL]
    log = (copy.evidence(releases["mtp"].tag) / "server.log").read_bytes()
    server = Engine.connect().client.containers.get(served["container"])
    assert served["ready"] and server.logs().startswith(log), "the server that was tested, and never started again"
    assert {stage: release.state for stage, release in releases.items()} == {
        "base": "passed", "hybrid": "passed", "mtp": "current",
    }  # fmt: skip
    below = {"hybrid": "base", "mtp": "hybrid"}
    for stage, release in releases.items():
        result = json.loads((copy.evidence(release.tag) / "result.json").read_text())
        (check,) = [check for check in result["checks"] if check["name"] == "drift"]
        assert check["applicable"] and check["passed"] and result["passed"]
        assert stage not in below or releases[below[stage]].tag in check["detail"]
        assert (copy.evidence(release.tag) / "server.log").stat().st_size > 1000
    for stage in below:  # as in its record: what was compared afterwards stands in both
        assert (releases[stage].smoke or {})["checks"] == json.loads(
            (copy.evidence(releases[stage].tag) / "result.json").read_text()
        )["checks"]
