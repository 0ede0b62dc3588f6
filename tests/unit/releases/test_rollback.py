"""Which release a rollback goes to, and the checkpoint of an old one."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_releases import release

from sparkpin.build import make
from sparkpin.build.pair import pair
from sparkpin.core.errors import CheckpointError, EngineError, InputError, IntegrityError, ManifestError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.releases import current
from sparkpin.releases.kept_inputs import KeptInputs
from sparkpin.releases.promotions import landing
from sparkpin.releases.record import Release, Releases
from sparkpin.releases.rollback import OF_THE_RELEASE, find_target, require_target
from sparkpin.serve import linked


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(tmp_path / "project", tmp_path / "cache", tmp_path / "home")


@pytest.mark.parametrize(
    ("script", "trail"),
    [
        ("A B C < <", "ABCBA"),
        ("A B C < < D <", "ABCBADA"),
        ("C B < <", "CBCA"),  # B was undone, and does not come back by itself
        ("A B C refused:B < allowed:B C <", "ABCCAACA"),
        ("A B B <", "ABBA"),
        ("B C < <", "BCBA"),  # A passed and never was current: only when nothing else is left
        ("C D < B <", "CDCBC"),
        ("A C < <", "ACA-"),
        ("D < < < <", "DCBA-"),
        ("A B C removed:B <", "ABCCA"),
        ("A B C refused:B < D <", "ABCCADA"),
    ],
)
def test_a_rollback_undoes_the_last_promotion_that_is_not_undone(paths: Paths, script: str, trail: str) -> None:
    """script: a letter promotes the release of that name, `<` rolls back; trail: what is current after each, `-` where
    there was nothing to go back to."""
    records, refused = Releases(paths), set[str]()
    made = {name: release(day, "passed") for day, name in enumerate("ABCD", 1)}
    names = {one.tag: name for name, one in made.items()}
    for one in made.values():
        records.save(one)
    trace = ""
    for word in script.split():
        current, (what, _, which) = records.current("tiny"), word.partition(":")
        if what in made:
            records.point(made[what])
        elif what == "<":
            assert current
            known, before = records.of_recipe("tiny"), records.before("tiny")
            target = landing(known, current, before, lambda one: names[one.tag] in refused)
            if not target:
                trace += "-"
                continue
            records.point(target, rollback=True)
        elif what == "removed":
            records.record_path(made[which]).unlink()
        elif what == "refused":
            refused.add(which)
        elif what == "allowed":
            refused.remove(which)
        trace += names[str(records.current_tag("tiny"))]
    assert trace == trail


def test_what_never_was_current_is_gone_back_to_last_and_of_the_same_stage_first() -> None:
    old, worse, other, late = (
        release(day, "passed", stage=stage) for day, stage in enumerate(("v2", "v2", "mtp", "v2"), 1)
    )
    current, asked = release(5, "current"), list[Release]()

    def refused(one: Release) -> bool:
        asked.append(one)
        return one in (worse, other, late)

    known = [old, worse, other, late, current]
    assert landing(known, current, [other.tag], refused) == old
    assert asked == [other, late, worse, old], "another stage that never was current is the last resort"
    assert landing([*known[1:], release(6, "passed")], current, [], refused) is None
    failed = dataclasses.replace(old, state="failed")
    assert landing([failed, current], current, [failed.tag], lambda one: False) is None


def test_promotions_are_appended_and_the_same_one_is_noted_once(paths: Paths) -> None:
    records = Releases(paths)
    first, second = release(1, "passed"), release(2, "passed")
    for one in (first, second, second):
        records.point(one)
    for _ in range(2):  # as after a kill: nobody knows whether the first had ended
        records.point(first, rollback=True)
    assert [(row.tag, row.rollback) for row in records.promotions("tiny")] == [
        (first.tag, False),
        (second.tag, False),
        (first.tag, True),
    ]
    assert records.before("tiny") == []


def complete_checkpoint(paths: Paths, wanted: Release) -> Path:
    folder = Releases(paths).checkpoint(wanted)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"tensors")
    record = {"key": wanted.checkpoint_key, "files": {"model.safetensors": {"size": 7}}}
    (folder / "sparkpin.json").write_text(json.dumps(record))
    return folder


def test_a_checkpoint_is_used_whatever_the_pins_say_by_now_unless_it_is_damaged(project: Path, paths: Paths) -> None:
    paths = dataclasses.replace(paths, project=project)
    inputs = pair(project, "scripted-tiny", stage="v2")[-1].inputs
    KeptInputs.of(paths).keep_project(project, inputs)
    shutil.rmtree(project / "pins")
    made = release(1, recipe="scripted-tiny", inputs=inputs)
    folder = complete_checkpoint(paths, made)
    assert make.checkpoint_of(paths, made) == folder
    (folder / "model.safetensors").write_bytes(b"half")
    with pytest.raises(CheckpointError, match="gone or damaged"):
        make.checkpoint_of(paths, made)


@pytest.fixture
def three(paths: Paths) -> tuple[Paths, Any, list[Release]]:
    """Three releases, each promoted after the one before, and an engine that has the image of each."""
    made = [release(day, "passed") for day in (1, 2, 3)]
    for one in made:
        Releases(paths).save(one)
        Releases(paths).checkpoint(one).mkdir(parents=True)
        Releases(paths).point(one)
    images = {one.tag: SimpleNamespace(config_digest=one.image) for one in made}
    return paths, SimpleNamespace(image=images.get, images=images), made


def test_a_stage_s_name_means_what_was_current_before_and_not_what_is(three: tuple[Paths, Any, list[Release]]) -> None:
    """The current release was current before, too."""
    paths, engine, (first, _, third) = three
    Releases(paths).point(first)
    assert require_target(paths, engine, "tiny", first.stage, lambda _: None).tag == third.tag
    assert require_target(paths, engine, "tiny", first.tag, lambda _: None).tag == first.tag, "as after a kill"
    with pytest.raises(InputError) as caught:
        require_target(paths, engine, "tiny", "v2-000000000000", lambda _: None)
    assert caught.value.next_step


def test_what_failed_since_it_was_looked_at_does_not_become_current(three: tuple[Paths, Any, list[Release]]) -> None:
    paths, engine, made = three
    records = Releases(paths)
    looked_at = records.get(made[0].tag)
    records.update(looked_at.tag, lambda known: dataclasses.replace(known or looked_at, state="failed"))
    for instead_of in (None, made[2]):
        with pytest.raises(InputError):
            current.make_current(paths, engine, looked_at, instead_of=instead_of)
    assert records.current_tag("tiny") == made[2].tag


@pytest.mark.parametrize(
    ("fault", "passed_over"),
    [
        (EngineError("no answer"), False),
        (IntegrityError("changed"), True),
        (CheckpointError("gone"), True),
        (ManifestError(Path("mtp.json"), "texts", "", "a record"), True),
    ],
)
def test_a_rollback_passes_over_what_is_gone_or_refused_and_not_over_a_fault_that_passes(
    three: tuple[Paths, Any, list[Release]], fault: SparkpinError, passed_over: bool
) -> None:
    paths, engine, made = three

    def check(one: Release) -> None:
        if one.tag == made[1].tag:
            raise fault

    if passed_over:
        assert find_target(paths, engine, "tiny", check).tag == made[0].tag
    else:
        with pytest.raises(type(fault)):
            find_target(paths, engine, "tiny", check)
    del engine.images[made[1].tag]
    assert find_target(paths, engine, "tiny", check).tag == made[0].tag, "its image is gone"


@pytest.mark.parametrize(
    ("away", "fault", "gone"),
    [
        (None, current.GoneError("no image"), True),
        (None, CheckpointError("no checkpoint"), True),
        (None, EngineError("refused"), False),
        (EngineError("no answer"), current.GoneError("no image"), False),
    ],
)
def test_another_machine_without_the_release_is_told_from_one_that_does_not_answer(
    paths: Paths, monkeypatch: pytest.MonkeyPatch, away: SparkpinError | None, fault: SparkpinError, gone: bool
) -> None:
    def require_model(*_: object) -> None:
        raise fault

    kept, reached = SimpleNamespace(urls=["here", "a", "b"]), (["a"], {"b": away} if away else {})
    monkeypatch.setattr(linked, "try_read", lambda *_: SimpleNamespace(cluster=kept))
    monkeypatch.setattr(linked.cluster, "require_model", require_model)
    monkeypatch.setattr(linked, "nodes_of", lambda _: 3)
    monkeypatch.setattr(linked, "reached", lambda _: contextlib.nullcontext(reached))
    with pytest.raises(SparkpinError) as caught:
        linked.require_there(paths, release(1))
    assert isinstance(caught.value, OF_THE_RELEASE) == gone
