"""A mod that is switched off, in a real server. Needs what ./install.sh leaves."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkout import Checkout

from sparkpin.host.engine import Engine
from sparkpin.releases.record import Releases

TRIAL = f"trial-{uuid.uuid4().hex[:8]}"  # other checkouts may test beside this one, and the engine has the tags of all


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[Checkout]:
    made = Checkout.make(tmp_path / "copy")
    yield made
    made.remove_tags(TRIAL)


@pytest.mark.slow
def test_a_mod_that_is_not_at_work_fails_the_smoke_test(main_job: Releases, copy: Checkout) -> None:
    copy.add_recipe(TRIAL, **{"stage: v2-tq": "stage: v2"})
    copy.replace("stages/v2.yaml", "smoke:", "serve: {env: {SPARKPIN_MOD_INT8_LM_HEAD: 0}}\nsmoke:")
    copy.ask_only("completion", "long-text", "drift", "mods")
    copy.done("build", "--recipe", TRIAL)
    tag = copy.release(stage="v2")["tag"]
    result = copy.invoke("smoke", tag)
    assert result.returncode == 10
    assert "int8-lm-head" in result.stdout
    assert copy.release(tag=tag)["state"] == "failed"
    assert Engine.connect().image(tag) is not None
    assert copy.invoke("promote", tag).returncode == 2
