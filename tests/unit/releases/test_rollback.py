"""Which release a rollback goes to, and the checkpoint of an old one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from made_releases import release

from sparkpin.build import make
from sparkpin.build.pair import pair
from sparkpin.commands import releases as commands_releases
from sparkpin.core.errors import CheckpointError
from sparkpin.core.paths import Paths
from sparkpin.releases import current as retention
from sparkpin.releases.kept_inputs import KeptInputs
from sparkpin.releases.record import Release, Releases


def test_a_rollback_tells_of_what_is_served_and_was_not_current() -> None:
    target, former, served = release(1, "current"), release(2, "retired"), release(3, "passed")
    for running in (None, former.tag, target.tag):
        assert not [line for line in commands_releases.went_back(former, target, running) if line.startswith("note: ")]
    note = commands_releases.went_back(former, target, served.tag)[-1]
    assert note.startswith(f"note: {served.tag} was served, and {former.tag} was current, which rollback goes by")
    assert note.endswith(f"invoke promote {former.tag}, then invoke serve --release {former.tag}")


def nobody(_: Release) -> bool:
    return False


def test_rollback_passes_over_what_did_not_pass() -> None:
    old = [release(1, "passed"), release(2, "failed"), release(3, "built")]
    current, newer = release(4, "current"), release(5, "passed")
    assert retention.rollback_target([*old, current, newer], current, nobody) == old[0]
    assert retention.rollback_target([*old[1:], current, newer], current, nobody) is None


def test_rollback_passes_over_what_has_lost_too_much() -> None:
    old, worse, other = release(1, "passed"), release(2, "passed"), release(3, "passed", stage="mtp")
    releases = [old, worse, other, current := release(4, "current")]
    asked: list[Release] = []

    def refused(one: Release) -> bool:
        asked.append(one)
        return one in (worse, other)

    assert retention.rollback_target(releases, current, refused) == old
    assert asked == [worse, old], "another stage is the last resort"
    assert retention.rollback_target([worse, other, current], current, refused) is None
    assert retention.rollback_target([worse, other, current], current, lambda one: one == worse) == other


def complete_checkpoint(paths: Paths, wanted: Release) -> Path:
    folder = Releases(paths).checkpoint(wanted)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"tensors")
    record = {"key": wanted.checkpoint_key, "files": {"model.safetensors": {"size": 7}}}
    (folder / "sparkpin.json").write_text(json.dumps(record))
    return folder


def test_a_release_s_checkpoint_is_used_whatever_the_pins_say_by_now(project: Path, tmp_path: Path) -> None:
    paths = Paths(project, tmp_path / "cache", tmp_path / "home")
    shutil.rmtree(project / "pins")
    folder = complete_checkpoint(paths, release(1))
    assert make.checkpoint_of(paths, release(1)) == folder


def test_a_damaged_checkpoint_that_the_pins_do_not_give_is_told(project: Path, tmp_path: Path) -> None:
    paths = Paths(project, tmp_path / "cache", tmp_path / "home")
    inputs = pair(project, "scripted-tiny", stage="v2")[-1].inputs
    KeptInputs.of(paths).keep_project(project, inputs)
    lost = release(1, recipe="scripted-tiny", inputs=inputs)
    (complete_checkpoint(paths, lost) / "model.safetensors").write_bytes(b"half")
    with pytest.raises(CheckpointError, match="gone or damaged") as caught:
        make.checkpoint_of(paths, lost)
    assert "invoke build --recipe scripted-tiny --stage v2" in caught.value.next_step
