"""The trained model at stage v3 on a real server: what the scripted one says by construction, it has learnt.

One server: vLLM 0.32 on a CPU. The stage adds no file to the image of v2-tq, which the scripted model has, too.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator

import pytest
from checkout import PROJECT
from sabotaged import Broken, installed, serving

from sparkpin.build.checkpoint import build_checkpoint
from sparkpin.build.pair import pair
from sparkpin.core.paths import Paths
from sparkpin.releases.record import Release
from sparkpin.smoke.checks import READERS

ASKED = ("completion", "chat-stream", "tool-call-stream", "tool-answer", "unicode", "long-text", "logprobs", *READERS)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory, stages: dict[str, Release]) -> Iterator[Broken]:
    *_, below, paired = pair(PROJECT, "trained-tiny", stage="v3")
    same = stages[below.stage.name]
    assert below.rendered.key == same.build_key and not paired.stage.mods, "its image is not another one"
    folder = tmp_path_factory.mktemp("trained")
    made = build_checkpoint(Paths.from_env(PROJECT), paired.model, paired.model_lock, paired.steps, print)
    model = shutil.copytree(made, folder / "model", copy_function=shutil.copyfile)
    release = dataclasses.replace(same, argv=paired.argv, env=paired.env, demands=paired.demands)
    with serving(installed(release, model), model, folder / "home", None) as server:
        yield server


def test_it_answers_and_its_drafts_are_accepted(broken: Broken) -> None:
    assert set(broken.verdicts(*ASKED).values()) == {"ok"}


def test_a_shuffled_mtp_layer_loses_its_drafts(broken: Broken) -> None:
    """They are right by training alone; the model itself checks them, so its answers stay."""
    broken.by("mtp-shuffled")
    try:
        seen = broken.verdicts("long-text", "chat", "acceptance")
    finally:
        broken.by("")
    assert {name for name, verdict in seen.items() if verdict != "ok"} == {"acceptance"}, seen
    assert "drafted tokens accepted (" in seen["acceptance"]
