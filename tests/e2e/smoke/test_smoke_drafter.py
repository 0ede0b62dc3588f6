"""A second model that drafts, on a real server, with the LM heads of both in INT8. One server: vLLM 0.32 on a CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from checkout import PROJECT
from cpu_stages import asked

from sparkpin.build.checkpoint import build_checkpoint
from sparkpin.build.pair import pair
from sparkpin.core.paths import Paths
from sparkpin.releases.record import Release
from sparkpin.smoke.checks import run_check
from sparkpin.smoke.subject import SmokeSubject

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory, stages: dict[str, Release]) -> Iterator[SmokeSubject]:
    paired = pair(PROJECT, "scripted-drafted", stage="v2-drafter")[-1]
    # Stage v2 bakes in the same mods, and is built.
    release = dataclasses.replace(stages["v2"], argv=paired.argv, env=paired.env, demands=paired.demands)
    own = dataclasses.replace(Paths.from_env(PROJECT), home=tmp_path_factory.mktemp("home"))
    model = build_checkpoint(own, paired.model, paired.model_lock, paired.steps)
    with asked(own, release, model) as found:
        yield found


def test_its_drafts_are_right_and_the_answers_those_of_the_model(subject: SmokeSubject) -> None:
    for name in ("chat", "tool-call", "tool-answer", "long-text", "mods", "acceptance"):
        found = run_check(name, subject)
        assert found.passed and found.applicable, (name, found.detail)
    # All of them: where the drafter writes over the model's states, some are lost (mods/vllm-cpu, draft_blocks.py).
    for floor, holds in ((0.999, True), (1.001, False)):
        strict = subject.demands.model_copy(update={"acceptance_floor": floor})
        assert run_check("acceptance", dataclasses.replace(subject, demands=strict)).passed is holds, floor
    log = subject.logs()[0].decode(errors="replace")
    assert "model='/model/drafter'" in log
    heads = [line for line in log.splitlines() if '"mod":"int8-lm-head"' in line and '"event":"active"' in line]
    assert len(heads) == 2
