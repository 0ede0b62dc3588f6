"""One model over two containers with a real vLLM, tensor parallel, with drafts and all mods of v2-tq: they have a
network of their own, and a worker dies. Needs what ./install.sh leaves.

Other faults have a stand-in for vLLM in tests/engine/serve/test_pair.py, for each costs a start of the pair. The usual
smoke test is in test_two_engines.py.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

import pytest
from checkout import Checkout
from nodes import pair
from watched import signal_processes, until

from sparkpin.build.make import checkpoint_of
from sparkpin.core.paths import Paths
from sparkpin.host.engine import Engine
from sparkpin.releases.record import Release, Releases

pytestmark = pytest.mark.slow

RECIPE = "paired"
IDLE = {"INTERVAL": 3600}
"""No request of its own: in the middle of one, vLLM itself fails with its peer."""


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


def test_a_worker_that_dies_ends_both_and_they_answer_again(paths: Paths, release: Release) -> None:
    checkpoint = checkpoint_of(paths, release)
    with pair(Engine.connect(), release, checkpoint, health=IDLE) as both:
        for lives, killed in ((2, 1), (3, 0)):
            until(both.answers)
            began = time.monotonic()
            signal_processes(both.containers[killed], "VLLM::Worker", "KILL")
            until(lambda other=1 - killed: both.said(other).count("has gone from torch's store") == 1)
            ended = time.monotonic()
            until(lambda lives=lives: both.lives() == [lives, lives] and both.answers())
            back = time.monotonic() - began
            print(f"rank {killed} killed: the other ended after {ended - began:.1f} s, answers after {back:.0f} s")
