"""The trained model at stage v3 on a real server: what the scripted one says by construction, it has learnt.

One server: vLLM 0.32 on a CPU.
"""

from __future__ import annotations

import dataclasses
import shutil
import uuid
from collections.abc import Iterator

import pytest
from checkout import Checkout
from sabotaged import Broken, installed, serving

from benchmarks.trained_tiny.quantise import MODEL, quantise
from sparkpin.build.checkpoint import build_checkpoint
from sparkpin.build.pair import pair
from sparkpin.core.paths import Paths
from sparkpin.releases.record import Releases
from sparkpin.smoke.demands import READERS

pytestmark = pytest.mark.slow

ASKED = ("completion", "chat-stream", "tool-call-stream", "tool-answer", "unicode", "long-text", "logprobs", *READERS)
TRIAL = f"trial-{uuid.uuid4().hex[:8]}"


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broken]:
    folder = tmp_path_factory.mktemp("trained")
    copy = Checkout.make(folder / "copy")
    quantise(MODEL, *(copy.folder / "pins/models/trained-tiny" / name for name in ("int4", "fp8")))
    (copy.folder / "recipes/trained-tiny.yaml").rename(copy.folder / f"recipes/{TRIAL}.yaml")
    copy.replace(f"recipes/{TRIAL}.yaml", "name: trained-tiny", f"name: {TRIAL}")
    try:
        copy.done("build", "--recipe", TRIAL, "--stage", "v3")
        own = dataclasses.replace(Paths.from_env(copy.folder), home=copy.home)
        *_, paired = pair(copy.folder, TRIAL, stage="v3")
        *_, release = Releases(own).of_recipe(TRIAL)
        assert release.stage == "v3"
        made = build_checkpoint(own, paired.model, paired.model_lock, paired.steps)
        model = shutil.copytree(made, folder / "model", copy_function=shutil.copyfile)
        with serving(installed(release, model), model, folder / "home", None) as server:
            yield server
    finally:
        copy.remove_tags(TRIAL)


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
