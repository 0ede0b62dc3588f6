"""Checks for which the scripted recipe and the cpu stack leave no room, on a real server: a prompt of 8K tokens, and
one that is answered from the prefix cache as from nothing.

Needs what ./install.sh leaves. Without drafts: vLLM's CPU platform copies states of a drafter with Triton alone.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

import pytest
from checkout import PROJECT
from cpu_stages import asked

from sparkpin.build.make import checkpoint_of
from sparkpin.core.paths import Paths
from sparkpin.pins.vllm_flags import drop_flags, set_flag
from sparkpin.releases.record import Release
from sparkpin.smoke import checks
from sparkpin.smoke.checks import run_check
from sparkpin.smoke.subject import SmokeSubject

pytestmark = pytest.mark.slow

LENGTH = 12_288
# Said, it stays. Else vLLM's CPU platform sets it anew once the engine has begun, when blocks have 384 tokens, and
# the scheduler ends no part of a prompt where a block ends: a prompt's first repetition finds nothing.
BLOCK = "128"
POSITIONS = '{"max_position_embeddings": 16384}'  # more than the model says it has; nothing in it depends on them


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory, stages: dict[str, Release]) -> Iterator[SmokeSubject]:
    paths = Paths.from_env(PROJECT)
    release = stages["hybrid"]  # the last one that drafts nothing
    argv = set_flag(drop_flags(release.argv, "--no-enable-prefix-caching"), "--max-model-len", str(LENGTH))
    argv = set_flag(set_flag(argv, "--enable-prefix-caching", None), "--hf-overrides", POSITIONS)
    argv = set_flag(argv, "--block-size", BLOCK)
    variant = dataclasses.replace(release, argv=tuple(argv))
    own = dataclasses.replace(paths, home=tmp_path_factory.mktemp("home"))  # its container is no leftover of ours
    model = checkpoint_of(paths, release)
    with asked(own, variant, model) as found:
        yield found


def test_a_prompt_of_8k_is_read_and_answered_from_the_cache_as_from_nothing(
    subject: SmokeSubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow the machine is."""
    monkeypatch.setattr(checks, "STEPS", (8_192,))
    monkeypatch.setattr(checks, "LONG_SECONDS", math.inf)
    found = run_check("long-context", subject)
    assert found.passed and found.applicable, found.detail
    assert any(8_000 < one < 9_000 for one in lengths(found.detail)), found.detail
    cached = run_check("prefix-cache", subject)
    assert cached.passed and cached.applicable, cached.detail
    assert "; 5760 of 6,0" in cached.detail, "all whole blocks of 384"
    assert checks.longest_prompt(subject, subject.expect.recall(64)[0]) >= checks.CACHED


def lengths(detail: str) -> list[int]:
    return [int(found.replace(",", "")) for found in re.findall(r"\d+,\d+", detail)]
