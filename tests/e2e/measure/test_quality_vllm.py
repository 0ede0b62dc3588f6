"""`invoke quality` with real servers: a stage whose checkpoint is damaged, against its parent."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import random_model
from checkout import Checkout

from sparkpin.core.paths import Paths
from sparkpin.releases.record import Releases

pytestmark = pytest.mark.slow


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[tuple[Checkout, str]]:
    """A checkout with a recipe of random weights whose FP8 shared experts are twice too large."""
    name = f"quality-{uuid.uuid4().hex[:8]}"
    made = Checkout.make(tmp_path / "copy")
    machine = Paths.from_env()
    for known in (
        machine.images,
        machine.layers,
        machine.inputs,
    ):  # how its images came about, else they are built anew
        if known.is_dir():
            shutil.copytree(known, made.home / known.name)
    random_model.add(made.folder, tmp_path / "model", name, stage="hybrid", length=320, damaged=True)
    yield made, name
    made.remove_tags(name)
    forget(made)


def forget(made: Checkout) -> None:
    """A release's key does not depend on the recipe's name, so an earlier run has measured the same."""
    cache = Paths.from_env().cache
    for release in Releases(Paths(made.folder, cache, made.home)).all():
        for measured in (cache / "quality").glob(f"{release.key[:16]}-*"):
            shutil.rmtree(measured)


def test_a_damaged_stage_is_measured_and_not_promoted(copy: tuple[Checkout, str]) -> None:
    made, name = copy
    made.done("lock", "--model", name)
    made.done("build", "--recipe", name)
    forget(made)
    first = made.invoke("quality", "--recipe", name, "--quick", "--json")
    assert first.returncode == 15, first.stderr
    told = json.loads(first.stdout)
    assert "no needles" in told["notes"][0] or "no needles" in told["notes"][1], told["notes"]
    assert (told["role"], told["quick"], told["vllm_release"]) == ("parent", True, "0.32.0")
    every = told["texts"][0]
    assert every["texts"] == 8 and every["tokens"] == 8 * 271
    refused = {judged["name"] for judged in told["judged"] if judged["kept"] == "more"}
    assert refused >= {"kl", "continued_kl", "top1"}, told["judged"]

    # All of it is known now: no server is started, so the measurement is the same to the last digit.
    again = made.invoke("quality", "--recipe", name, "--quick", "--json")
    assert "starting its server" in first.stderr and "starting its server" not in again.stderr
    assert json.loads(again.stdout)["texts"] == told["texts"]

    release = made.release(recipe=name, stage="hybrid")["tag"]
    paths = Paths(made.folder, made.home, made.home)
    Releases(paths).smoked(release, {"passed": True, "seconds": 1.0, "checks": []})  # it would pass, and a server costs
    answer = made.invoke("promote", release)
    assert answer.returncode == 15 and "--accept-loss" in answer.stderr
    assert made.release(recipe=name, stage="hybrid")["state"] == "passed"
    made.done("promote", release, "--accept-loss", "a test")
    assert made.release(recipe=name, stage="hybrid")["state"] == "current"
    assert Releases(paths).promotions(name)[-1].accepted["kl"] == "a test"
