"""`up --serve` with real servers: what it tests and serves, and that no check of the others is lost."""

from __future__ import annotations

import json
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
from sparkpin.releases.inside import BEGUN
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


def test_the_last_two_stages_are_tested_the_server_of_the_last_stays_and_smoke_tests_the_rest(copy: Checkout) -> None:
    records = Releases(Paths(copy.folder, copy.home, copy.home))

    def states() -> dict[str, str]:
        return {release.stage: release.state for release in records.of_recipe(TRIAL)}

    done = copy.invoke("up", "--recipe", TRIAL, "--stage", "mtp", "--serve")
    assert done.returncode == 0, done.stdout + done.stderr
    assert states() == {"base": "built", "hybrid": "passed", "mtp": "current"}
    (served,) = [one for one in json.loads(copy.done("status", "--json")) if one["recipe"] == TRIAL]
    assert served["ready"] and served["release"] == records.current_tag(TRIAL)
    log = (copy.evidence(served["release"]) / "server.log").read_bytes()
    server = Engine.connect().client.containers.get(served["container"])
    assert server.logs().startswith(log) and server.logs().count(BEGUN.encode()) == 1, "the server that was tested"
    copy.done("smoke", "--recipe", TRIAL)
    assert states() == {"base": "passed", "hybrid": "passed", "mtp": "current"}
    releases = {release.stage: release for release in records.of_recipe(TRIAL)}
    for stage, below in (("hybrid", "base"), ("mtp", "hybrid")):  # hybrid: compared afterwards, which stands in both
        result = json.loads((copy.evidence(releases[stage].tag) / "result.json").read_text())
        (check,) = [check for check in result["checks"] if check["name"] == "drift"]
        assert check["applicable"] and check["passed"] and releases[below].tag in check["detail"]
        assert (releases[stage].smoke or {})["checks"] == result["checks"]
