"""Promotion and rollback, with image and checkpoint, and the list of releases; in a real engine of the tests' own."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from made_releases import built, digest, states

from sparkpin.build import consistent
from sparkpin.commands import releases as commands_releases
from sparkpin.commands import serve as commands_serve
from sparkpin.core.errors import CheckpointError, EngineError, InputError, IntegrityError, ManifestError, SmokeError
from sparkpin.core.paths import Paths
from sparkpin.host.engine import Engine
from sparkpin.releases import current as retention
from sparkpin.releases import keep
from sparkpin.releases import rollback as rolling
from sparkpin.releases.record import Release, Releases

pytest_plugins = ["empty_engine"]


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(tmp_path / "project", tmp_path / "cache", tmp_path / "home")


@pytest.fixture
def engine(empty_engine: Engine) -> Engine:
    return empty_engine


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """These releases have no build records, which the commands want to see (tests/adversary)."""
    monkeypatch.setattr(consistent, "require_consistent", lambda *_, **__: [])


@pytest.mark.parametrize("state", ["built", "failed"])
def test_only_what_passed_is_promoted(paths: Paths, engine: Engine, state: str) -> None:
    made = built(paths, engine, 1, state)
    with pytest.raises(InputError, match=f"is {state}") as caught:
        retention.promote(paths, engine, made.tag)
    assert caught.value.next_step == f"invoke smoke {made.tag}"
    assert digest(engine, "sparkpin/tiny:current") is None
    assert Releases(paths).current("tiny") is None


def test_promote_and_roll_back(paths: Paths, engine: Engine) -> None:
    first, second, third = (built(paths, engine, number) for number in (1, 2, 3))
    built(paths, engine, 4, "failed")
    told: list[str] = []
    assert retention.promote(paths, engine, first.tag).state == "current"
    assert retention.promote(paths, engine, third.tag).tag == third.tag
    assert states(paths) == ["retired", "passed", "current", "failed"]
    former, back = rolling.rollback(paths, engine, "tiny", told.append)
    assert former.tag == third.tag
    assert (back.tag, back.checkpoint_key, back.argv) == (first.tag, first.checkpoint_key, first.argv)
    assert digest(engine, "sparkpin/tiny:current") == first.image
    assert states(paths) == ["current", "passed", "retired", "failed"] and not told
    with pytest.raises(InputError, match="no release of 'tiny' to go back to"):
        rolling.rollback(paths, engine, "tiny", print)
    assert Releases(paths).current("tiny") == dataclasses.replace(first, state="current")
    assert retention.promote(paths, engine, second.tag).state == "current"
    assert retention.promote(paths, engine, third.tag).state == "current", "a previous release may come back"
    assert rolling.rollback(paths, engine, "tiny", print, to=first.name)[1].tag == first.tag, "two steps at once"
    for other, following in ((first, "invoke images"), (second, f"invoke promote {second.tag}")):  # undone with them
        with pytest.raises(InputError) as caught:
            rolling.rollback(paths, engine, "tiny", print, to=other.tag)
        assert caught.value.next_step.startswith(following)


def test_what_never_was_current_comes_back_only_when_nothing_else_is_left(paths: Paths, engine: Engine) -> None:
    first, second, third = (built(paths, engine, number) for number in (1, 2, 3))
    retention.promote(paths, engine, first.tag)
    retention.promote(paths, engine, third.tag)
    shutil.rmtree(Releases(paths).checkpoint(first))
    told: list[str] = []
    with pytest.raises(CheckpointError) as caught:
        rolling.rollback(paths, engine, "tiny", told.append, to=first.tag)
    assert f"invoke reproduce {first.tag} --keep" in caught.value.next_step
    assert rolling.rollback(paths, engine, "tiny", told.append)[1].tag == second.tag
    assert len(told) == 2 and told[0].startswith(f"passed over {first.tag}: ") and second.tag in told[1]


@pytest.mark.usefixtures("made_up")
def test_a_dry_run_says_where_a_rollback_goes_and_changes_nothing(
    paths: Paths, engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, third = (built(paths, engine, number) for number in (1, 2, 3))
    for one in (first, second, third):
        retention.promote(paths, engine, one.tag)
    Releases(paths).record_path(second).unlink()
    pointer = Releases(paths).pointer_path("tiny")
    before = pointer.read_bytes()
    monkeypatch.setattr(Paths, "from_env", lambda: paths)
    monkeypatch.setattr(commands_releases, "engine_of", lambda _: engine)
    commands_releases.rollback(recipe="tiny", dry_run=True)
    said = capsys.readouterr()
    assert second.tag in said.err and f"invoke diff {third.tag} {first.tag}" in said.out
    for text in (third.tag, f"to {first.tag}: image {first.image[7:19]}", first.checkpoint_key[:12], "--number 1"):
        assert text in said.out
    assert pointer.read_bytes() == before and digest(engine, "sparkpin/tiny:current") == third.image
    commands_releases.rollback(recipe=None, to=first.tag)
    assert Releases(paths).current_tag("tiny") == first.tag, "the tag names its recipe"


@pytest.mark.usefixtures("made_up")
def test_a_rollback_that_cannot_be_served_changes_nothing(
    paths: Paths, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = promoted(paths, engine, 2)

    def refused(*, release: str, **_: object) -> None:
        assert release == first.tag and Releases(paths).current_tag("tiny") == first.tag
        raise SmokeError("did not become ready")

    monkeypatch.setattr(Paths, "from_env", lambda: paths)
    monkeypatch.setattr(commands_releases, "engine_of", lambda _: engine)
    monkeypatch.setattr(commands_serve, "serve", refused)
    with pytest.raises(SmokeError):
        commands_releases.rollback(recipe="tiny", serve_it=True)
    assert Releases(paths).current_tag("tiny") == second.tag
    assert Releases(paths).unfinished("tiny") is None
    assert digest(engine, "sparkpin/tiny:current") == second.image


def test_a_rollback_that_fails_leaves_what_somebody_promoted_meanwhile(paths: Paths, engine: Engine) -> None:
    first, *_ = promoted(paths, engine, 3)

    def then(*_: Release) -> None:
        retention.promote(paths, engine, first.tag)
        raise SmokeError("did not become ready")

    with pytest.raises(SmokeError):
        rolling.rollback(paths, engine, "tiny", print, then=then)
    assert Releases(paths).current_tag("tiny") == first.tag
    assert digest(engine, "sparkpin/tiny:current") == first.image


def promoted(paths: Paths, engine: Engine, count: int) -> list[Release]:
    """So many releases, each of which was current once; the last one is."""
    made = [built(paths, engine, number) for number in range(1, count + 1)]
    return [retention.promote(paths, engine, one.tag) for one in made]


class Killed(BaseException):
    """As SIGKILL: nobody catches it, so nothing is said or mended."""


@pytest.mark.parametrize("how", [KeyboardInterrupt, Killed])
def test_an_interrupted_rollback_is_finished_and_does_not_go_back_once_more(
    paths: Paths, engine: Engine, how: type[BaseException]
) -> None:
    first, second, third = promoted(paths, engine, 3)
    records, told, done = Releases(paths), list[str](), list[tuple[str, str]]()

    def interrupted(*_: Release) -> None:
        raise how

    def then(former: Release, release: Release) -> None:
        done.append((former.tag, release.tag))

    for _ in range(2):  # also when its repetition is interrupted
        with pytest.raises(how):
            rolling.rollback(paths, engine, "tiny", told.append, then=interrupted)
        assert records.current_tag("tiny") == second.tag
        assert [line for line in told if line.startswith(f"current is {second.tag}")] or how is Killed
    rolling.rollback(paths, engine, "tiny", told.append, then=then)
    assert told[-1].startswith(f"finishing the rollback from {third.tag}")
    assert done == [(third.tag, second.tag)] and records.current_tag("tiny") == second.tag
    assert rolling.rollback(paths, engine, "tiny", told.append)[1].tag == first.tag, "the next one goes on"
    for one in (second, third):
        retention.promote(paths, engine, one.tag)
    with pytest.raises(how):
        rolling.rollback(paths, engine, "tiny", told.append, then=interrupted)
    retention.promote(paths, engine, third.tag)
    assert rolling.rollback(paths, engine, "tiny", told.append)[1].tag == second.tag, "a promote ends it, too"


def test_rollback_passes_over_a_record_that_is_not_of_what_was_built(paths: Paths, engine: Engine) -> None:
    first, second, third = promoted(paths, engine, 3)
    told: list[str] = []

    def look(release: Release) -> None:
        if release.tag != first.tag:
            raise IntegrityError("changed")

    assert rolling.rollback(paths, engine, "tiny", told.append, look)[1].tag == first.tag
    assert told == [f"passed over {second.tag}: changed"]
    retention.promote(paths, engine, second.tag)
    Releases(paths).record_path(first).unlink()
    retention.promote(paths, engine, third.tag)
    with pytest.raises(IntegrityError):
        rolling.rollback(paths, engine, "tiny", told.append, look)
    assert Releases(paths).current_tag("tiny") == third.tag


def test_a_release_that_promote_refuses_comes_back_by_its_name_alone(paths: Paths, engine: Engine) -> None:
    first, worse, last = promoted(paths, engine, 3)
    told: list[str] = []
    spoil(paths, worse)
    assert rolling.rollback(paths, engine, "tiny", told.append)[1].tag == first.tag
    assert len(told) == 1 and told[0].startswith(f"passed over {worse.tag}: ") and "mtp.json" in told[0]
    retention.promote(paths, engine, last.tag)
    spoil(paths, first)
    with pytest.raises(ManifestError) as caught:
        rolling.rollback(paths, engine, "tiny", print)
    assert caught.value.next_step == f"rm {Releases(paths).evidence(first) / 'quality/mtp.json'}, then invoke quality"
    assert retention.promote(paths, engine, worse.tag).state == "current"


def spoil(paths: Paths, made: Release) -> None:
    """A record that cannot be read shows no quality."""
    folder = Releases(paths).evidence(made) / "quality"
    folder.mkdir()
    (folder / "mtp.json").write_text("{}")


def test_rollback_without_a_current_release(paths: Paths, engine: Engine) -> None:
    with pytest.raises(InputError, match="no current release") as caught:
        rolling.rollback(paths, engine, "tiny", print)
    assert caught.value.next_step.startswith("invoke up")
    made = built(paths, engine, 1)
    with pytest.raises(InputError, match="no current release") as caught:
        rolling.rollback(paths, engine, "tiny", print)
    assert caught.value.next_step == f"invoke promote {made.tag}"


@pytest.mark.parametrize("action", ["promote", "rollback"])
def test_a_switch_killed_half_way_is_repaired_by_running_it_again(
    paths: Paths, engine: Engine, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (built(paths, engine, number) for number in (1, 2))
    start, wanted = (first, second) if action == "promote" else (second, first)
    retention.promote(paths, engine, start.tag)

    def act() -> Release:
        if action == "promote":
            return retention.promote(paths, engine, second.tag)
        return rolling.rollback(paths, engine, "tiny", print)[1]

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Releases, "point", killed)
        act()
    assert digest(engine, "sparkpin/tiny:current") == wanted.image
    current = Releases(paths).current("tiny")
    assert current is not None and current.tag == start.tag, "the pointer is the truth"
    assert act().tag == wanted.tag
    assert digest(engine, "sparkpin/tiny:current") == wanted.image
    assert sorted(states(paths)) == ["current", "retired"]


def test_rollback_changes_nothing_when_the_image_is_gone(paths: Paths, engine: Engine) -> None:
    first, second = (built(paths, engine, number) for number in (1, 2))
    retention.promote(paths, engine, second.tag)
    engine.client.api.remove_image(first.image, force=True)
    with pytest.raises(EngineError, match=first.image) as caught:
        rolling.rollback(paths, engine, "tiny", print)
    assert f"invoke reproduce {first.tag} --keep" in caught.value.next_step
    assert digest(engine, "sparkpin/tiny:current") == second.image
    assert states(paths) == ["passed", "current"]


def test_rollback_does_not_trust_a_tag_that_names_another_image(paths: Paths, engine: Engine) -> None:
    first, second = (built(paths, engine, number) for number in (1, 2))
    retention.promote(paths, engine, second.tag)
    engine.tag(second.tag, first.tag)
    assert rolling.rollback(paths, engine, "tiny", print)[1].tag == first.tag
    assert digest(engine, "sparkpin/tiny:current") == first.image
    assert digest(engine, first.tag) == first.image


def test_rollback_changes_nothing_when_the_checkpoint_is_gone(paths: Paths, engine: Engine) -> None:
    first, second = (built(paths, engine, number) for number in (1, 2))
    retention.promote(paths, engine, second.tag)
    folder = Releases(paths).checkpoint(first)
    folder.rename(folder.with_name("away"))
    with pytest.raises(CheckpointError, match=str(folder)):
        rolling.rollback(paths, engine, "tiny", print)
    assert digest(engine, "sparkpin/tiny:current") == second.image
    assert states(paths) == ["passed", "current"]


def test_rows_tell_sizes_and_what_is_missing(paths: Paths, engine: Engine) -> None:
    first, second, third = (built(paths, engine, number) for number in (1, 2, 3))
    retention.promote(paths, engine, second.tag)
    engine.client.api.remove_image(third.image, force=True)
    rows, shared = retention.rows(paths, engine)
    assert json.loads(json.dumps(rows)) == rows
    assert [row["tag"] for row in rows] == [third.tag, second.tag, first.tag]
    assert [row["state"] for row in rows] == ["passed", "current", "passed"]
    assert [row["image"] for row in rows] == [None, second.image, first.image]
    assert [row["unique_size"] for row in rows] == [0, 200_000, 100_000]
    assert [row["size"] for row in rows] == [600_000, 500_000, 400_000]
    assert shared == 300_000, "the layer that all stand on, once"
    assert rows[0]["smoke"] == "passed in 3 s"


def test_a_damaged_record_stops_neither_the_list_nor_a_rollback(paths: Paths, engine: Engine) -> None:
    first, second, third = (built(paths, engine, number) for number in (1, 2, 3))
    retention.promote(paths, engine, third.tag)
    records = Releases(paths)
    records.record_path(second).write_text("{")
    rows, _ = retention.rows(paths, engine)
    assert [row["tag"] for row in rows] == [third.tag, first.tag]
    assert rolling.rollback(paths, engine, "tiny", print)[1].tag == first.tag
    assert digest(engine, "sparkpin/tiny:current") == first.image
    assert retention.promote(paths, engine, third.tag).state == "current"


@pytest.mark.usefixtures("made_up")
def test_the_tasks_tell_of_a_damaged_record(
    paths: Paths, engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{Path(engine.client.info()['DockerRootDir']).parent / 'docker.sock'}")
    monkeypatch.setenv("SPARKPIN_CACHE", str(paths.cache))
    monkeypatch.setenv("SPARKPIN_HOME", str(paths.home))
    first, second, third = (built(paths, engine, number) for number in (1, 2, 3))
    retention.promote(paths, engine, third.tag)
    path = Releases(paths).record_path(second)
    path.write_text("{")
    with pytest.raises(ManifestError) as caught:
        commands_releases.images(as_json=False)
    assert caught.value.file == str(path)
    out = capsys.readouterr().out
    assert third.name in out and first.name in out
    commands_releases.rollback(recipe="tiny")
    said = capsys.readouterr()
    assert f"passed over: {path}" in said.err
    lines = said.out.splitlines()
    assert lines[:2] == [
        f"back from {third.tag}",
        f"to {first.tag}: image {first.image[7:19]}, checkpoint {first.checkpoint_key[:12]}",
    ]
    assert lines[-1] == "next: invoke serve --recipe tiny"


def test_the_list_fits_a_terminal_and_tells_notes_and_what_is_shared(
    paths: Paths, engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{Path(engine.client.info()['DockerRootDir']).parent / 'docker.sock'}")
    monkeypatch.setenv("SPARKPIN_CACHE", str(paths.cache))
    monkeypatch.setenv("SPARKPIN_HOME", str(paths.home))
    commands_releases.images(as_json=False)
    assert capsys.readouterr().out == "no release yet; next: invoke up\n"
    first = built(paths, engine, 1, stage="hybrid")
    smoke = {"passed": False, "seconds": 1.0, "checks": [{"name": "chat", "passed": False, "detail": "500"}]}
    second = built(paths, engine, 2, "failed", smoke=smoke)
    keep.pin(Releases(paths), first.tag, "the one that works")
    engine.client.api.remove_image(second.image, force=True)
    commands_releases.images(as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[:7])) <= 80
    found = [" ".join(line.split()) for line in lines]
    assert found[:2] == ["sparkpin/tiny:", "release state smoke size own size created"]
    assert found[3:5] == [
        f"{second.name} failed failed missing 0.0 MB 2026-01-02 00:00",
        f"{first.name} passed passed 3 s 0.4 MB 0.4 MB 2026-01-01 00:00",
    ]
    assert lines[5:] == [
        f"{second.name}: smoke test failed: chat",
        f"{first.name}: kept since {keep.all_pins(Releases(paths))[first.tag].since[:10]}: the one that works",
        f"missing: the engine has not the image of {second.name}: invoke reproduce {second.name} --keep",
        "own size: layers that no other image has. Those that images share, once: 0.0 MB.",
    ]
