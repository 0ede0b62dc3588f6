"""Promotion and rollback, with image and checkpoint, and the list of releases; in a real engine of the tests' own."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from made_releases import built, digest, states

from sparkpin.build import consistent
from sparkpin.cli import releases as commands_releases
from sparkpin.cli import serve as commands_serve
from sparkpin.core.errors import CheckpointError, EngineError, InputError, ManifestError, SmokeError
from sparkpin.core.paths import Paths
from sparkpin.host.engine import Engine
from sparkpin.releases import current as retention
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
    for other in (first, second):  # undone with them
        with pytest.raises(InputError):
            rolling.rollback(paths, engine, "tiny", print, to=other.tag)


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
    monkeypatch.setattr(commands_serve, "serve_release", refused)
    with pytest.raises(SmokeError):
        commands_releases.rollback(recipe="tiny", serve=True)
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
    assert caught.value.file.endswith("mtp.json")
    assert retention.promote(paths, engine, worse.tag).state == "current"


def spoil(paths: Paths, made: Release) -> None:
    """A record that cannot be read shows no quality."""
    folder = Releases(paths).evidence(made) / "quality"
    folder.mkdir()
    (folder / "mtp.json").write_text("{}")


@pytest.mark.parametrize("lost", ["image", "checkpoint"])
def test_rollback_changes_nothing_when_a_part_is_gone(paths: Paths, engine: Engine, lost: str) -> None:
    first, second = (built(paths, engine, number) for number in (1, 2))
    retention.promote(paths, engine, second.tag)
    folder = Releases(paths).checkpoint(first)
    if lost == "image":
        engine.client.api.remove_image(first.image, force=True)
    else:
        folder.rename(folder.with_name("away"))
    error, where = (EngineError, first.image) if lost == "image" else (CheckpointError, str(folder))
    with pytest.raises(error, match=where):
        rolling.rollback(paths, engine, "tiny", print)
    assert digest(engine, "sparkpin/tiny:current") == second.image
    assert states(paths) == ["passed", "current"]
