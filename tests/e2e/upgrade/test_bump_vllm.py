"""A step of `invoke bump` with real servers: quality, of an image in which one more package perturbs the logits.

Speed is tried by hand (docs/bump.md): it takes minutes, and depends on what else the machine does.
"""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from checkout import PROJECT

from sparkpin.cli import upgrade
from sparkpin.core.paths import Paths
from sparkpin.host.engine import Engine
from sparkpin.measure.quality import corpus
from sparkpin.releases.record import Release, Releases
from sparkpin.upgrade.bump_steps import Candidate

pytestmark = pytest.mark.slow

SITE = "opt/vllm/lib/python3.11/site-packages"
PLUGIN = """
import torch
from vllm.model_executor.layers.logits_processor import LogitsProcessor

whole = LogitsProcessor.forward


def forward(self, *args, **options):
    logits = whole(self, *args, **options)
    return logits + torch.randn(logits.shape[-1], generator=torch.Generator().manual_seed(7)).to(logits.dtype) * 8


def register():
    LogitsProcessor.forward = forward
"""


@pytest.fixture
def noisy(stages: dict[str, Release], tmp_path: Path) -> Iterator[Release]:
    """Another image, as a search for what turned a step makes them: it has no record."""
    info = tmp_path / "site/noise-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: noise\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nnoise = noise:register\n")
    (info.parent / "noise.py").write_text(PLUGIN)
    known, name = stages["base"], f"bump-{uuid.uuid4().hex[:12]}"
    try:
        docker("create", "--name", name, known.tag)
        docker("cp", f"{info.parent}/.", f"{name}:/{SITE}")
        digest = docker("commit", name, f"sparkpin/{known.recipe}:{name}")
        yield other(known, tag=f"sparkpin/{known.recipe}:{name}", image=digest)
    finally:
        docker("rm", name)
        docker("rmi", f"sparkpin/{known.recipe}:{name}")


def docker(*words: str) -> str:
    return subprocess.run(["docker", *words], check=True, capture_output=True, text=True).stdout.strip()


def other(known: Release, **changes: str) -> Release:
    """One that nothing is kept of."""
    return dataclasses.replace(known, key=2 * uuid.uuid4().hex, **changes)


def test_a_package_that_loses_quality_turns_and_the_same_image_does_not(
    stages: dict[str, Release], noisy: Release, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upgrade.corpus, "load", partial(corpus.load, quick=True))
    machine, known = Paths.from_env(PROJECT), stages["base"]
    own = Paths(PROJECT, tmp_path / "cache", tmp_path / "home")
    shutil.copytree(Releases(machine).checkpoint(known), Releases(own).checkpoint(known))
    for kept in ("inputs", "images"):
        (own.home / kept).symlink_to(machine.home / kept)
    judge = Candidate(own, Engine.connect(), known, (), upgrade.commands(own)).judge("quality")
    assert [judge(one, tmp_path / "log").verdict for one in (other(known), noisy)] == ["good", "bad"]
    assert "kl" in (tmp_path / "log").read_text()
