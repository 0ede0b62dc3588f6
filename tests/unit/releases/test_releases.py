"""Records of releases: whole or refused, and what the promotions make of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, cast

import pytest
from held_lock import held_lock
from made_releases import release, states

from sparkpin.cli import notes
from sparkpin.core.errors import BusyError, InputError, IntegrityError, ManifestError, SparkpinError
from sparkpin.core.files import lock
from sparkpin.core.paths import Paths
from sparkpin.host import machine
from sparkpin.host.engine import Engine
from sparkpin.releases import current, record
from sparkpin.releases.record import Release, Releases, State, release_key


@pytest.fixture
def records(tmp_path: Path) -> Releases:
    """With the first release."""
    records = Releases(Paths(tmp_path / "project", tmp_path / "cache", tmp_path / "home"))
    records.save(release(1))
    return records


@pytest.mark.parametrize("state", ["built", "failed", "inspected", "passed", "current", "retired"])
def test_what_never_passed_is_not_served(records: Releases, state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "obstacle", lambda *_, **__: "")
    monkeypatch.setattr(notes, "require_consistent", lambda *_: None)
    one: Release = release(1, state)
    if one.is_good:
        notes.require_runnable(records.paths, cast(Engine, None), one, to_serve=True)
    else:
        with pytest.raises(InputError) as caught:
            notes.require_runnable(records.paths, cast(Engine, None), one, to_serve=True)
        assert f"invoke smoke {one.tag}" in caught.value.next_step
    notes.require_runnable(records.paths, cast(Engine, None), one)  # `bench` takes any


def test_who_asks_for_what_failed_learns_which_of_its_stage_passed_last(records: Releases) -> None:
    for number, state, stage in ((2, "passed", "v2"), (3, "passed", "base"), (4, "failed", "v2")):
        records.save(release(number, state, stage=stage))
    newest = records.get("v2")
    with pytest.raises(InputError) as caught:
        current.promote(records.paths, cast(Engine, None), newest)
    assert newest.state == "failed" and release(2, "passed").tag in caught.value.next_step
    assert release(3, "passed", stage="base").tag not in caught.value.next_step


@pytest.mark.parametrize(("failed", "file"), [("start", "server.log"), ("chat", "exchanges.jsonl")])
def test_after_a_failed_smoke_test_each_next_step_is_its_evidence(
    records: Releases, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failed: str, file: str
) -> None:
    """`serve` named `smoke`, and that itself. The test has printed why it failed, so that is not told once more."""
    monkeypatch.setattr(notes, "obstacle", lambda *_, **__: "")
    checks = [{"name": failed, "passed": False, "detail": "it ended\nfirst error: why"}]
    one = release(4, "failed", smoke={"passed": False, "seconds": 1.0, "checks": checks})
    records.save(one)
    paths, engine = records.paths, cast(Engine, None)
    for ask in (
        lambda: current.promote(paths, engine, one),
        lambda: notes.require_runnable(paths, engine, one, to_serve=True),
        lambda: notes.report(paths, (one,)),
        lambda: current.require_current(records, "tiny"),
    ):
        with pytest.raises(SparkpinError) as caught:
            ask()
        assert caught.value.next_step.startswith(f"read {records.evidence(one)}/smoke/{file}")
    shown = capsys.readouterr()
    assert "it ended" in shown.out and "first error" not in shown.out + shown.err


def test_a_record_comes_back_as_it_was(records: Releases) -> None:
    wanted = release(1)
    assert records.get(wanted.tag) == records.get(wanted.tag.removeprefix("sparkpin/")) == wanted
    assert records.all() == records.of_recipe("tiny") == [wanted]
    assert (records.root / f"tiny/v2-{wanted.key[:12]}.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes somebody else for a moment: run as root")
def test_another_user_s_record_is_one_clear_error(records: Releases) -> None:
    os.seteuid(65534)
    try:
        with pytest.raises((InputError, PermissionError)) as caught:
            records.find(release(1).tag)
    finally:
        os.seteuid(0)
    assert isinstance(caught.value, InputError) and caught.value.next_step


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes somebody else for a moment: run as root")
def test_a_folder_of_another_owner_who_lets_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the folders above it are root's alone
    records = Releases(Paths(Path("project"), Path("cache"), Path("home")))
    (records.root / "tiny").mkdir(parents=True)
    for folder in (tmp_path, records.root, records.root / "tiny"):
        folder.chmod(0o777)
    os.seteuid(65534)
    try:
        with records.locked("tiny"):
            pass
    finally:
        os.seteuid(0)


def test_the_key_covers_everything_that_is_served() -> None:
    base = release_key("a", "b", ["c"], {"d": "e"})
    others = [("x", "b", ["c"], {"d": "e"}), ("a", "x", ["c"], {"d": "e"}), ("a", "b", ["x"], {"d": "e"})]
    assert len({base, *(release_key(*other) for other in others), release_key("a", "b", ["c"], {"d": "x"})}) == 5
    assert release_key("a", "b", ["c"], {"x": "1", "y": "2"}) == release_key("a", "b", ["c"], {"y": "2", "x": "1"})


@pytest.mark.parametrize(
    "tag", ["sparkpin/tiny:v2-000000000000", "../../etc/passwd", "sparkpin/tiny:current", "current"]
)
def test_an_unknown_release_is_one_clear_error(records: Releases, tag: str) -> None:
    with pytest.raises(InputError) as caught:
        records.get(tag)
    assert "invoke images" in caught.value.next_step


def test_the_end_of_a_tag_or_a_stage_is_enough(records: Releases) -> None:
    old, new, upper = release(1), release(2), release(3, stage="v2-tq")
    for made in (new, upper):
        records.save(made)
    for wanted, name in ((old, old.name), (new, "v2"), (upper, "v2-tq")):
        for written in (name, f"tiny:{name}", f"sparkpin/tiny:{name}"):
            assert records.get(written) == wanted
    records.point(old)
    assert records.get("current").tag == records.get("tiny:current").tag == old.tag


def test_a_stage_of_several_recipes_is_the_default_one_s(records: Releases, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "default_recipe", lambda _: "one without releases")
    other = release(2, recipe="other")
    records.save(other)
    with pytest.raises(InputError) as caught:
        records.get("v2")
    assert release(1).tag in caught.value.next_step and other.tag in caught.value.next_step
    for day, promoted in enumerate((release(1), other), start=1):
        monkeypatch.setattr(record, "now", lambda day=day: f"2026-01-0{day}T00:00:00Z")
        records.point(promoted)
        assert records.get("v2").tag == records.get("current").tag == promoted.tag
    assert records.get("other:v2") == records.get(other.name) == records.get("v2", "other")
    for name in (other.tag, other.name):
        with pytest.raises(InputError):
            records.get(name, "tiny")


def test_the_only_recipe_with_releases_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "default_recipe", lambda project, stack=None: "default")
    records = Releases(Paths(tmp_path, tmp_path, tmp_path))
    assert records.default_recipe() == "default"
    records.save(release(1))
    assert records.default_recipe() == release(1).recipe
    records.save(release(2, recipe="other"))
    records.record_path(release(2, recipe="other")).write_text("{")
    assert records.default_recipe() == "default"
    records.point(records.get(release(1).tag))
    assert records.default_recipe() == release(1).recipe, "of several, the one that became current last"
    records.promotions_path("other").write_text("{")
    assert records.default_recipe() == release(1).recipe


def test_a_slip_in_a_tag_tells_the_nearest(records: Releases) -> None:
    made = [release(number) for number in range(2, 8)]
    for one in made:
        records.save(one)
    with pytest.raises(InputError) as caught:
        records.get(made[3].name[:-1] + "x")
    assert caught.value.next_step.startswith(f"did you mean {made[3].tag}")


def test_the_newest_of_a_stage_is_not_told_from_what_is_left(records: Releases) -> None:
    """A damaged record may be the newest one; a whole tag still names its own."""
    records.save(release(2))
    records.record_path(release(2)).write_text("{")
    assert records.get(release(1).name) == release(1)
    with pytest.raises(ManifestError):
        records.get("v2")
    found, faults = records.readable("tiny")
    assert (found, [fault.file for fault in faults]) == ([release(1)], [str(records.record_path(release(2)))])


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"schema": 2}, "schema"),
        ({"image": "latest"}, "image"),
        ({"created": "2026-99-99T99:99:99Z"}, "created"),
        ({"surprise": 1}, "surprise"),
        ({"stage": "other"}, "key"),  # it is another one's than the file is called
    ],
)
def test_a_wrong_record_is_named(records: Releases, change: dict[str, Any], key: str) -> None:
    path = records.record_path(release(1))
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ManifestError) as caught:
        records.all()
    assert (caught.value.file, caught.value.key) == (str(path), key)
    assert caught.value.next_step


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\xfe"])
def test_a_corrupt_record_or_pointer_is_named(records: Releases, content: bytes) -> None:
    for path in (records.record_path(release(1)), records.promotions_path("tiny")):
        path.write_bytes(content)
        with pytest.raises(ManifestError) as caught:
            records.all()
        assert caught.value.file == str(path)
        path.unlink()


def test_a_pointer_to_nothing_is_an_error_not_none(records: Releases) -> None:
    records.point(release(1))
    records.record_path(release(1)).unlink()
    with pytest.raises(ManifestError):
        records.current("tiny")
    assert records.current("another") is None


def test_names_of_internal_images_are_not_for_recipes(records: Releases) -> None:
    with pytest.raises(InputError, match="stack-"):
        records.save(release(1, recipe="stack-cpu"))


def test_the_promotions_decide_what_is_current(records: Releases) -> None:
    for number in (1, 2):
        records.save(release(number, "passed"))
    texts = [records.record_path(release(number)).read_text() for number in (1, 2)]
    for number, wanted in ((1, ["current", "passed"]), (2, ["retired", "current"])):
        records.point(release(number))
        assert states(records.paths) == wanted
    for one in records.of_recipe("tiny"):
        records.save(one)
    assert [records.record_path(release(number)).read_text() for number in (1, 2)] == texts, "one file says it"
    assert records.find(release(1).tag).state == "retired"  # type: ignore[union-attr]


def result(seconds: float, failure: str = "") -> dict[str, Any]:
    checks = [{"name": "health", "passed": True, "detail": ""}]
    checks += [{"name": "chat", "passed": False, "detail": failure}] if failure else []
    return {"passed": not failure, "seconds": seconds, "checks": checks}


def test_smoke_results_decide_the_state(records: Releases) -> None:
    good, bad = result(12.4), result(1.0, "500")
    failed = records.smoked(release(1).tag, bad)
    assert (failed.state, failed.smoke_passed, failed.smoke_failures) == ("failed", False, ["chat: 500"])
    passed = records.smoked(release(1).tag, good)
    assert passed.state == "passed" and passed == records.get(passed.tag)
    records.point(passed)
    assert records.smoked(passed.tag, bad).state == "current"
    records.save(release(2, "passed"))
    records.point(release(2))
    assert states(records.paths) == ["failed", "current"], "what failed while it was current is nothing to go back to"


def test_the_current_image_cannot_change_under_its_record(records: Releases) -> None:
    records.save(release(1, "passed"))
    records.save(release(1, "built", image="sha256:" + "a" * 64))
    records.point(records.get(release(1).tag))
    with pytest.raises(IntegrityError, match="is current with image sha256:aaaa"):
        records.save(release(1))
    assert records.get(release(1).tag).image == "sha256:" + "a" * 64


def test_writers_of_a_recipe_wait_for_each_other_and_die_without_trace(records: Releases) -> None:
    path = records.root / "tiny/.lock"
    with held_lock(path):
        with pytest.raises(BusyError), lock(path, wait=False):
            pass
        records.save(release(1, recipe="another"))
    left = path.with_name(".partial-of-a-killed-run")
    left.write_text("{")
    records.save(release(1))
    assert records.get(release(1).tag) == release(1) and not left.exists()
