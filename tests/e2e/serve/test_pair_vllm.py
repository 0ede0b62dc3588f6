"""One model over two containers with a real vLLM, tensor parallel, with drafts and all mods of v2-tq: the usual smoke
test, and a worker that dies. Neither has a network. Needs what ./install.sh leaves.

The other faults have a stand-in for vLLM in tests/engine/serve/test_peers.py, for each costs a start of the pair.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

import pytest
from checkout import Checkout
from nodes import pair
from watched import signal_processes, until

from sparkpin.build.make import checkpoint_of
from sparkpin.core.paths import Paths
from sparkpin.host.engine import Engine
from sparkpin.pins.nodes import nodes_of
from sparkpin.releases.record import Release, Releases
from sparkpin.serve.launch import Health
from sparkpin.smoke import mods

RECIPE = "paired"


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory, stages: dict[str, Release]) -> Iterator[Checkout]:
    made = Checkout.make(tmp_path_factory.mktemp("pair") / "copy")
    text = (made.folder / "recipes/scripted-pair.yaml").read_text()
    (made.folder / f"recipes/{RECIPE}.yaml").write_text(text.replace("name: scripted-pair", f"name: {RECIPE}", 1))
    made.done("build", "--recipe", RECIPE, "--stage", "v2-tq")
    yield made
    made.remove_tags(RECIPE)


@pytest.fixture(scope="module")
def paths(copy: Checkout) -> Paths:
    return dataclasses.replace(Paths.from_env(copy.folder), home=copy.home)


@pytest.fixture(scope="module")
def release(paths: Paths) -> Release:
    return next(one for one in Releases(paths).of_recipe(RECIPE) if one.stage == "v2-tq")


def test_two_nodes_pass_the_usual_smoke_test(copy: Checkout, release: Release) -> None:
    assert nodes_of(release.argv) == 2 and {"acceptance", "mods", "long-text"} <= set(release.demands.checks)
    copy.done("smoke", release.tag)
    folder = copy.evidence(release.tag)
    result = json.loads((folder / "result.json").read_text())
    assert result["passed"] and result["acceptance"] == 1.0 and result["drafted_tokens"] > 100
    logs = [(folder / name).read_bytes() for name in ("server.log", "server-1.log")]
    active = [mods.active(mods.reports(log)) for log in logs]
    assert active[0] == active[1] == {"hybrid-int4-fp8", "int8-lm-head", "turboquant", "vllm-cpu"}
    assert b"rank 1 is here" in logs[0] and b"(Worker_TP1" in logs[1], "halves, each in a container of its own"


def test_a_worker_that_dies_ends_both_and_they_answer_again(paths: Paths, release: Release) -> None:
    checkpoint = checkpoint_of(paths, release)
    with pair(Engine.connect(), [release] * 2, [checkpoint] * 2, health=Health()) as both:
        until(both.answers)
        signal_processes(both.containers[1], "VLLM::Worker", "KILL")
        until(lambda: both.lives() == [2, 2] and both.answers())
        assert both.counted()[0] == "0", "the head did not end by itself"
