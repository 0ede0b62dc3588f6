"""Promotion and rollback, with image and checkpoint, and the list of releases; in a real engine of the tests' own."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from heard import heard
from made_releases import built, states, tags

from sparkpin.build import consistent
from sparkpin.cli import releases as commands_releases
from sparkpin.cli import serve as commands_serve
from sparkpin.core.errors import CheckpointError, EngineError, InputError, SmokeError
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
def tasks(paths: Paths, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands on these releases, which have no build records to look at (tests/adversary)."""
    monkeypatch.setattr(consistent, "require_consistent", lambda *_, **__: [])
    monkeypatch.setattr(Paths, "from_env", lambda: paths)
    monkeypatch.setattr(commands_releases, "engine_of", lambda _: engine)


def roll_back(paths: Paths, engine: Engine) -> Release:
    """As the task does; the release that is current then."""
    former = retention.require_current(Releases(paths), "tiny")
    target = rolling.find_target(paths, engine, "tiny", lambda release: None)
    retention.make_current(paths, engine, target, instead_of=former)
    return retention.require_current(Releases(paths), "tiny")


def require_previous(paths: Paths, engine: Engine) -> str | None:
    """The release that the list calls the previous one, if any: where a rollback goes."""
    rows = retention.list_images(paths, engine).rows
    listed = [row["tag"] for row in rows if row["previous"]]
    try:
        target = rolling.find_target(paths, engine, "tiny", lambda release: None).tag
    except InputError:
        target = None
    assert listed == ([target] if target else [])
    return target


def test_promote_and_roll_back(paths: Paths, engine: Engine) -> None:
    first, second, third = (built(paths, engine, number) for number in (1, 2, 3))
    built(paths, engine, 4, "failed")
    before = tags(engine)
    assert retention.promote(paths, engine, first).state == "current"
    assert retention.promote(paths, engine, third).tag == third.tag
    assert states(paths) == ["retired", "passed", "current", "failed"]
    assert require_previous(paths, engine) == first.tag
    told = heard()
    back = roll_back(paths, engine)
    assert (back.tag, back.checkpoint_key, back.argv) == (first.tag, first.checkpoint_key, first.argv)
    assert states(paths) == ["current", "passed", "retired", "failed"] and not told
    assert require_previous(paths, engine) is None, "what was rolled back is not the way back"
    with pytest.raises(InputError):
        roll_back(paths, engine)
    assert tags(engine) == before, "what is current is the data directory's to say: several may share an engine"
    assert Releases(paths).current("tiny") == dataclasses.replace(first, state="current")
    for one in (second, third):
        assert retention.promote(paths, engine, one).state == "current", "a previous release may come back"
    assert require_previous(paths, engine) == second.tag
    (Releases(paths).checkpoint(second) / "model.safetensors").unlink()
    Releases(paths).checkpoint(second).rmdir()
    assert require_previous(paths, engine) == first.tag, "a rollback passes over what has no checkpoint"


@pytest.mark.usefixtures("tasks")
@pytest.mark.parametrize("compared", [True, False])
def test_who_promotes_what_was_not_compared_is_warned(paths: Paths, engine: Engine, compared: bool) -> None:
    checks = [{"name": "drift", "passed": True, "applicable": compared, "detail": ""}]
    made = built(paths, engine, 1, smoke={"passed": True, "seconds": 1.0, "checks": checks})
    told = heard()
    commands_releases.promote(paths, made.tag)
    assert Releases(paths).current_tag("tiny") == made.tag
    assert any(line.startswith("warning") for line in told) is not compared


@pytest.mark.usefixtures("tasks")
def test_the_same_rollback_again_changes_nothing_more(paths: Paths, engine: Engine) -> None:
    first, second, third = promoted(paths, engine, 3)
    for _ in range(2):
        commands_releases.rollback(paths, recipe=None, to=first.tag)
        assert Releases(paths).current_tag("tiny") == first.tag, "the tag names its recipe; two steps at once"
    for other in (second, third):  # undone with it
        with pytest.raises(InputError):
            commands_releases.rollback(paths, recipe="tiny", to=other.tag)
    assert len(Releases(paths).promotions("tiny")) == 4


@pytest.mark.usefixtures("tasks")
def test_a_dry_run_says_where_a_rollback_goes_and_changes_nothing(
    paths: Paths, engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, third = promoted(paths, engine, 3)
    Releases(paths).record_path(second).unlink()
    path = Releases(paths).promotions_path("tiny")
    before = path.read_bytes()
    commands_releases.rollback(paths, recipe="tiny", dry_run=True)
    said = capsys.readouterr()
    assert second.tag in said.err and f"invoke diff {third.tag} {first.tag}" in said.out
    for text in (third.tag, f"to {first.tag}: image {first.image[7:19]}", first.checkpoint_key[:12]):
        assert text in said.out
    assert path.read_bytes() == before


@pytest.mark.usefixtures("tasks")
@pytest.mark.parametrize("end", [SmokeError, KeyboardInterrupt])
def test_a_rollback_serves_first_and_records_last(
    paths: Paths, engine: Engine, monkeypatch: pytest.MonkeyPatch, end: type[BaseException]
) -> None:
    """So what ends it before has changed nothing, and the same command again does it all."""
    first, second = promoted(paths, engine, 2)
    served: list[str] = []

    def serve(paths: Paths, release: str) -> None:
        assert Releases(paths).current_tag("tiny") == second.tag
        served.append(release)
        if len(served) == 1:
            raise end("did not become ready")

    monkeypatch.setattr(commands_serve, "serve", serve)
    before = Releases(paths).promotions_path("tiny").read_bytes()
    with pytest.raises(end):
        commands_releases.rollback(paths, recipe="tiny", serve=True)
    assert Releases(paths).promotions_path("tiny").read_bytes() == before
    commands_releases.rollback(paths, recipe="tiny", serve=True)
    assert served == [first.tag, first.tag] and Releases(paths).current_tag("tiny") == first.tag


@pytest.mark.usefixtures("tasks")
def test_a_rollback_says_which_of_two_it_would_leave(
    paths: Paths, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where another release is served than the current one, it would keep, and promote, what is to go."""
    first, second = promoted(paths, engine, 2)
    served: list[str] = []
    monkeypatch.setattr(commands_serve, "serve", lambda paths, release: served.append(release))
    monkeypatch.setattr(commands_releases, "running_release", lambda *_: first.tag)
    with pytest.raises(InputError):
        commands_releases.rollback(paths, recipe="tiny", serve=True)
    assert served == [] and Releases(paths).current_tag("tiny") == second.tag
    commands_releases.rollback(paths, to=first.tag, serve=True)
    assert served == [first.tag] and Releases(paths).current_tag("tiny") == first.tag


def test_a_rollback_leaves_what_somebody_promoted_meanwhile(paths: Paths, engine: Engine) -> None:
    first, second, third = promoted(paths, engine, 3)
    retention.promote(paths, engine, first)
    with pytest.raises(InputError):
        retention.make_current(paths, engine, second, instead_of=third)
    assert Releases(paths).current_tag("tiny") == first.tag


def promoted(paths: Paths, engine: Engine, count: int) -> list[Release]:
    """So many releases, each of which was current once; the last one is."""
    made = [built(paths, engine, number) for number in range(1, count + 1)]
    return [retention.promote(paths, engine, one) for one in made]


@pytest.mark.parametrize("lost", ["image", "checkpoint"])
def test_rollback_changes_nothing_when_a_part_is_gone(paths: Paths, engine: Engine, lost: str) -> None:
    first, second = (built(paths, engine, number) for number in (1, 2))
    retention.promote(paths, engine, second)
    folder = Releases(paths).checkpoint(first)
    if lost == "image":
        engine.client.api.remove_image(first.image, force=True)
    else:
        folder.rename(folder.with_name("away"))
    error, where = (EngineError, first.image) if lost == "image" else (CheckpointError, str(folder))
    with pytest.raises(error, match=where):
        roll_back(paths, engine)
    assert states(paths) == ["passed", "current"]
