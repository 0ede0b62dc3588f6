"""A picture asked of a real multimodal server: its tokens are counted, and a model that sees nothing fails the check.

Needs what ./install.sh leaves.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import vision_model
from checkout import PROJECT
from cpu_stages import ready

from sparkpin.core.paths import Paths
from sparkpin.pins.vllm_flags import set_flag
from sparkpin.releases.record import Release
from sparkpin.serve.proxy import before
from sparkpin.smoke.checks import run_check
from sparkpin.smoke.expectations import expectations
from sparkpin.smoke.run import subject_of

pytestmark = pytest.mark.slow

SIDE = 96  # pixels of the red square
TOKENS = (SIDE // (vision_model.PATCH * vision_model.MERGE)) ** 2


def test_a_picture_reaches_the_model_and_a_blind_one_is_told_apart(tmp_path: Path, stages: dict[str, Release]) -> None:
    paths = Paths.from_env(PROJECT)
    release = stages["base"]
    argv = set_flag(set_flag(release.argv, "--load-format", "dummy"), "--limit-mm-per-prompt", {"image": 1, "video": 0})
    variant = dataclasses.replace(release, argv=tuple(argv))
    own = dataclasses.replace(paths, home=tmp_path / "home")  # its container is no leftover of ours
    model = tmp_path / "model"
    vision_model.generate(model)
    with before(own, ready(own, variant, model)) as (server, client):
        subject, expect = subject_of(variant, client, server), expectations("any")
        asked = expect.cases["image"]
        case = dataclasses.replace(asked, request={**asked.request, "max_tokens": 8})
        expect = dataclasses.replace(expect, cases={"image": case})
        subject = dataclasses.replace(subject, expect=expect)
        words = [part for part in case.request["messages"][0]["content"] if part["type"] == "text"]
        alone = {**case.request, "messages": [{"role": "user", "content": words}]}
        counted = [subject.chat(dataclasses.replace(case, request=one)).prompt for one in (case.request, alone)]
        assert counted[0] - counted[1] == TOKENS + 2  # and the marks around them
        found = run_check("image", subject)
        assert found.applicable and not found.passed, found.detail
        assert "status" not in found.detail, found.detail
