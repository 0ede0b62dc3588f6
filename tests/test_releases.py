"""Records, promotion, rollback and pruning; what touches images does so in a real engine of the tests' own."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from private_engine import file_layer, load_image, private_engine, quiet, sleeper

from sparkpin import jobs, retention
from sparkpin import layers as layer_sizes
from sparkpin import prune as pruning
from sparkpin.container import CACHE_LABEL, cache_volume
from sparkpin.engine import Engine
from sparkpin.errors import BusyError, CheckpointError, EngineError, InputError, IntegrityError, ManifestError
from sparkpin.files import lock
from sparkpin.paths import Paths
from sparkpin.releases import Demands, Release, Releases, release_key, tag_of

BASE = file_layer("base", b"b" * 300_000)
SHA = "0123456789abcdef" * 4


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(tmp_path / "project", tmp_path / "cache", tmp_path / "home")


@pytest.fixture(scope="module")
def shared_engine() -> Iterator[Engine]:
    with private_engine() as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    yield shared_engine
    for container in shared_engine.client.containers.list(all=True):
        container.remove(force=True)
    for image in shared_engine.client.images.list():
        shared_engine.client.api.remove_image(image.id, force=True)


def release(number: int, state: str = "built", **changes: Any) -> Release:
    """The release of day `number`."""
    recipe, stage = changes.get("recipe", "tiny"), changes.get("stage", "v2")
    build_key, checkpoint = f"{number:02x}" * 32, changes.get("checkpoint_key", f"{number:02x}" * 32)
    argv, env = ("vllm", "serve", "/model", "--number", str(number)), {"NUMBER": str(number)}
    key = release_key(build_key, checkpoint, argv, env)
    return Release(
        **{
            "tag": tag_of(recipe, stage, key),
            "recipe": recipe,
            "stage": stage,
            "stack": "cpu",
            "model": "tiny-model",
            "key": key,
            "build_key": build_key,
            "image": f"sha256:{number:064x}",
            "diff_ids": (f"sha256:{number:064x}",),
            "size": 1000 + number,
            "checkpoint_key": checkpoint,
            "argv": argv,
            "env": env,
            "created": f"2026-01-{number:02}T00:00:00Z",
            "build_seconds": 1.5,
            "demands": Demands(checks=("chat", "mods"), mods=(), acceptance_floor=None, scripted=False),
            "state": state,
            "smoke": {"passed": True, "seconds": 3.2, "checks": []} if state in ("passed", "retired") else None,
            "inputs": {"pins/stacks/cpu.lock": SHA},
            **changes,
        }
    )


def built(paths: Paths, engine: Engine, number: int, state: str = "passed", **changes: Any) -> Release:
    """A release with an image of two layers (one common to all), a checkpoint and evidence."""
    top = file_layer(f"top{number}", bytes([number]) * 100_000 * number)
    stage = changes.get("stage", "v2")
    internal = f"sparkpin/stack-cpu:{stage}-{f'{number:02x}' * 6}"
    image = load_image(engine, internal, [BASE, top])
    made = release(number, state, image=image.config_digest, diff_ids=image.diff_ids, size=image.size, **changes)
    records = Releases(paths)
    engine.tag(internal, made.tag)
    engine.tag(internal, f"sparkpin/{made.recipe}:{stage}")
    records.save(made)
    checkpoint = records.checkpoint(made)
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "model.safetensors").write_bytes(bytes(8192))
    records.evidence(made).mkdir(parents=True)
    (records.evidence(made) / "server.log").write_text("ready\n")
    return made


def tags(engine: Engine) -> set[str]:
    return {tag for image in engine.client.api.images() for tag in image["RepoTags"] or () if "<none>" not in tag}


def digest(engine: Engine, ref: str) -> str | None:
    image = engine.image(ref)
    return image.config_digest if image else None


def states(paths: Paths, recipe: str = "tiny") -> list[str]:
    return [release.state for release in Releases(paths).of_recipe(recipe)]


# Records


def test_a_record_comes_back_as_it_was(paths: Paths) -> None:
    records, wanted = Releases(paths), release(1)
    records.save(wanted)
    assert records.get(wanted.tag) == wanted
    assert records.get(wanted.tag.removeprefix("sparkpin/")) == wanted
    assert records.all() == records.of_recipe("tiny") == [wanted]
    value = json.loads((paths.releases / f"tiny/v2-{wanted.key[:12]}.json").read_text())
    assert value["schema"] == 1
    assert value["argv"] == ["vllm", "serve", "/model", "--number", "1"]
    assert value["inputs"] == {"pins/stacks/cpu.lock": SHA}


def test_the_key_covers_everything_that_is_served() -> None:
    base = release_key("a", "b", ["c"], {"d": "e"})
    others = [("x", "b", ["c"], {"d": "e"}), ("a", "x", ["c"], {"d": "e"}), ("a", "b", ["x"], {"d": "e"})]
    assert len({base, *(release_key(*other) for other in others), release_key("a", "b", ["c"], {"d": "x"})}) == 5
    assert release_key("a", "b", ["c"], {"x": "1", "y": "2"}) == release_key("a", "b", ["c"], {"y": "2", "x": "1"})


def test_an_unknown_release_lists_the_known(paths: Paths) -> None:
    records = Releases(paths)
    with pytest.raises(InputError, match="unknown release 'nope'") as caught:
        records.get("nope")
    assert "invoke build" in caught.value.next_step
    records.save(release(1))
    for tag in ("sparkpin/tiny:v2-000000000000", "../../etc/passwd", "sparkpin/tiny:current"):
        with pytest.raises(InputError) as caught:
            records.get(tag)
        assert release(1).tag in caught.value.next_step


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"schema": 2}, "schema"),
        ({"image": "latest"}, "image"),
        ({"state": "good"}, "state"),
        ({"size": "1"}, "size"),
        ({"surprise": 1}, "surprise"),
        ({"argv": "vllm serve"}, "argv"),
    ],
)
def test_a_wrong_record_is_named(paths: Paths, change: dict[str, Any], key: str) -> None:
    records = Releases(paths)
    records.save(release(1))
    path = records.record_path(release(1))
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ManifestError) as caught:
        records.all()
    assert (caught.value.file, caught.value.key) == (str(path), key)
    assert caught.value.next_step


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'"text"'])
def test_a_corrupt_record_or_pointer_is_named(paths: Paths, content: bytes) -> None:
    records = Releases(paths)
    records.save(release(1))
    for path in (records.record_path(release(1)), records.pointer_path("tiny")):
        path.write_bytes(content)
        with pytest.raises(ManifestError) as caught:
            records.all()
        assert caught.value.file == str(path)
        path.unlink()


def test_a_record_under_another_ones_name_is_refused(paths: Paths) -> None:
    records = Releases(paths)
    records.save(release(1))
    path = records.record_path(release(1))
    path.rename(path.with_name("v2-000000000000.json"))
    with pytest.raises(ManifestError, match="as the file is called"):
        records.all()


def test_a_pointer_to_nothing_is_an_error_not_none(paths: Paths) -> None:
    records = Releases(paths)
    records.save(release(1))
    records.point(release(1))
    records.forget(release(1))
    with pytest.raises(ManifestError, match="a release that has a record"):
        records.current("tiny")
    assert records.current("another") is None


def test_names_of_internal_images_are_not_for_recipes(paths: Paths) -> None:
    with pytest.raises(InputError, match="stack-"):
        Releases(paths).save(release(1, recipe="stack-cpu"))


def test_the_pointer_decides_what_is_current(paths: Paths) -> None:
    records = Releases(paths)
    for number in (1, 2):
        records.save(release(number, "passed"))
    records.point(release(1))
    assert states(paths) == ["current", "passed"]
    text = records.record_path(release(1)).read_text()
    records.point(release(2))
    records.record_path(release(1)).write_text(text)  # as if the run had been killed before it wrote this record
    assert states(paths) == ["retired", "current"]
    assert records.find(release(1).tag).state == "retired"  # type: ignore[union-attr]


@dataclasses.dataclass(frozen=True)
class Check:
    name: str
    passed: bool
    detail: str


@dataclasses.dataclass(frozen=True)
class Result:
    passed: bool
    seconds: float
    checks: tuple[Check, ...]
    log_path: Path


def test_smoke_results_decide_the_state(paths: Paths) -> None:
    records = Releases(paths)
    good = Result(True, 12.4, (Check("health", True, ""),), Path("/x/server.log"))
    bad = Result(False, 1.0, (Check("health", True, ""), Check("chat", False, "500")), Path("/x/server.log"))
    records.save(release(1))
    failed = records.smoked(release(1).tag, bad)
    assert (failed.state, failed.smoke_passed, failed.smoke_failures) == ("failed", False, ["chat: 500"])
    assert failed.smoke_text == "failed: chat"
    passed = records.smoked(release(1).tag, good)
    assert (passed.state, passed.smoke_text) == ("passed", "passed in 12 s")
    assert passed == records.get(passed.tag)
    assert passed.smoke is not None and passed.smoke["log_path"] == "/x/server.log"
    records.point(passed)
    assert records.smoked(passed.tag, bad).state == "current"
    records.save(release(2, "passed"))
    records.point(release(2))
    assert states(paths) == ["failed", "current"], "what failed while it was current is nothing to go back to"


def test_the_current_image_cannot_change_under_its_record(paths: Paths) -> None:
    records = Releases(paths)
    records.save(release(1, "passed"))
    records.save(release(1, "built", image="sha256:" + "a" * 64))
    records.point(records.get(release(1).tag))
    with pytest.raises(IntegrityError, match="is current with image sha256:aaaa"):
        records.save(release(1))
    assert records.get(release(1).tag).image == "sha256:" + "a" * 64


def hold(path: Path, held: Any, go: Any) -> None:
    with lock(path):
        held.set()
        go.wait(30)


def test_writers_of_a_recipe_wait_for_each_other_and_die_without_trace(paths: Paths) -> None:
    records = Releases(paths)
    context = multiprocessing.get_context("spawn")
    held, go = context.Event(), context.Event()
    other = context.Process(target=hold, args=(paths.releases / "tiny/.lock", held, go))
    other.start()
    assert held.wait(30)
    with pytest.raises(BusyError), lock(paths.releases / "tiny/.lock", wait=False):
        pass
    records.save(release(1, recipe="another"))
    other.kill()
    other.join()
    records.save(release(1))
    assert records.get(release(1).tag) == release(1)


# Layers


def test_chain_ids_are_those_of_the_specification() -> None:
    import hashlib

    second = "sha256:" + hashlib.sha256(b"sha256:a sha256:b").hexdigest()
    third = "sha256:" + hashlib.sha256(f"{second} sha256:c".encode()).hexdigest()
    assert layer_sizes.chain_ids(("sha256:a", "sha256:b", "sha256:c")) == ["sha256:a", second, third]
    assert layer_sizes.chain_ids(()) == []


@pytest.mark.parametrize(
    ("history", "count", "wanted"),
    [([5, 0, 7], 3, [5, 0, 7]), ([5, 0, 7], 2, [5, 7]), ([5, 0, 0], 2, None), ([], 0, []), ([], 2, None)],
)
def test_sizes_of_layers(history: list[int], count: int, wanted: list[int] | None) -> None:
    assert layer_sizes.layer_sizes(history, count) == wanted


# Promotion and rollback


@pytest.mark.engine
@pytest.mark.parametrize("state", ["built", "failed"])
def test_only_what_passed_is_promoted(paths: Paths, engine: Engine, state: str) -> None:
    made = built(paths, engine, 1, state)
    with pytest.raises(InputError, match=f"is {state}") as caught:
        retention.promote(paths, engine, made.tag)
    assert caught.value.next_step == f"invoke smoke --release {made.tag}"
    assert digest(engine, "sparkpin/tiny:current") is None
    assert Releases(paths).current("tiny") is None


@pytest.mark.engine
def test_promote_and_roll_back(paths: Paths, engine: Engine) -> None:
    first, second, third = (built(paths, engine, number) for number in (1, 2, 3))
    built(paths, engine, 4, "failed")
    assert retention.promote(paths, engine, first.tag).state == "current"
    assert retention.promote(paths, engine, third.tag).tag == third.tag
    assert states(paths) == ["retired", "passed", "current", "failed"]
    assert digest(engine, "sparkpin/tiny:current") == third.image
    back = retention.rollback(paths, engine, "tiny")
    assert (back.tag, back.checkpoint_key, back.argv) == (second.tag, second.checkpoint_key, second.argv)
    assert digest(engine, "sparkpin/tiny:current") == second.image
    assert states(paths) == ["retired", "current", "retired", "failed"]
    assert retention.rollback(paths, engine, "tiny").tag == first.tag
    with pytest.raises(InputError, match="none to go back to"):
        retention.rollback(paths, engine, "tiny")
    assert Releases(paths).current("tiny") == dataclasses.replace(first, state="current")
    assert retention.promote(paths, engine, third.tag).state == "current", "a retired release may come back"


def test_rollback_passes_over_what_did_not_pass() -> None:
    old = [release(1, "passed"), release(2, "failed"), release(3, "built")]
    current, newer = release(4, "current"), release(5, "passed")
    assert retention.rollback_target([*old, current, newer], current) == old[0]
    assert retention.rollback_target([*old[1:], current, newer], current) is None


@pytest.mark.engine
def test_rollback_without_a_current_release(paths: Paths, engine: Engine) -> None:
    built(paths, engine, 1)
    with pytest.raises(InputError, match="no current release") as caught:
        retention.rollback(paths, engine, "tiny")
    assert "invoke promote TAG" in caught.value.next_step


@pytest.mark.engine
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
        return retention.rollback(paths, engine, "tiny")

    def killed(*_: object) -> None:
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


@pytest.mark.engine
def test_rollback_changes_nothing_when_the_image_is_gone(paths: Paths, engine: Engine) -> None:
    first, second = (built(paths, engine, number) for number in (1, 2))
    retention.promote(paths, engine, second.tag)
    engine.client.api.remove_image(first.image, force=True)
    with pytest.raises(EngineError, match=first.image) as caught:
        retention.rollback(paths, engine, "tiny")
    assert "check out the commit in which pins/stacks/cpu.lock" in caught.value.next_step
    assert "invoke build --recipe tiny --stage v2" in caught.value.next_step
    assert digest(engine, "sparkpin/tiny:current") == second.image
    assert states(paths) == ["passed", "current"]


@pytest.mark.engine
def test_rollback_does_not_trust_a_tag_that_names_another_image(paths: Paths, engine: Engine) -> None:
    first, second = (built(paths, engine, number) for number in (1, 2))
    retention.promote(paths, engine, second.tag)
    engine.tag(second.tag, first.tag)
    assert retention.rollback(paths, engine, "tiny").tag == first.tag
    assert digest(engine, "sparkpin/tiny:current") == first.image
    assert digest(engine, first.tag) == first.image


@pytest.mark.engine
def test_rollback_changes_nothing_when_the_checkpoint_is_gone(paths: Paths, engine: Engine) -> None:
    first, second = (built(paths, engine, number) for number in (1, 2))
    retention.promote(paths, engine, second.tag)
    folder = Releases(paths).checkpoint(first)
    folder.rename(folder.with_name("away"))
    with pytest.raises(CheckpointError, match=str(folder)):
        retention.rollback(paths, engine, "tiny")
    assert digest(engine, "sparkpin/tiny:current") == second.image
    assert states(paths) == ["passed", "current"]


def test_how_to_rebuild_tells_whether_the_inputs_are_still_there(paths: Paths) -> None:
    import hashlib

    lock_file = paths.project / "pins/stacks/cpu.lock"
    lock_file.parent.mkdir(parents=True)
    lock_file.write_text("locked")
    same = release(1, inputs={"pins/stacks/cpu.lock": hashlib.sha256(b"locked").hexdigest()})
    assert "the pins still give this release" in retention.how_to_rebuild(paths, same)
    assert "pins/stacks/cpu.lock were as in the record" in retention.how_to_rebuild(paths, release(1))


# The list


@pytest.mark.engine
def test_rows_tell_sizes_and_what_is_missing(paths: Paths, engine: Engine) -> None:
    first, second, third = (built(paths, engine, number) for number in (1, 2, 3))
    retention.promote(paths, engine, second.tag)
    engine.client.api.remove_image(third.image, force=True)
    rows = retention.rows(paths, engine)
    assert json.loads(json.dumps(rows)) == rows
    assert [row["tag"] for row in rows] == [third.tag, second.tag, first.tag]
    assert [row["state"] for row in rows] == ["passed", "current", "passed"]
    assert [row["image"] for row in rows] == [None, second.image, first.image]
    assert [row["unique_size"] for row in rows] == [0, 200_000, 100_000]
    assert [row["size"] for row in rows] == [600_000, 500_000, 400_000]
    assert rows[0]["smoke"] == "passed in 3 s"


# Pruning


def ago(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let `prune` believe that all there is was made `seconds` ago."""
    monkeypatch.setattr(pruning.time, "time", lambda: TIME() + seconds)


TIME: Callable[[], float] = time.time


def test_prune_prefers_what_can_be_gone_back_to() -> None:
    old, back, other = release(1, "passed"), release(2, "retired"), release(3, "passed", stage="base")
    current, fresh, failed = release(4, "current"), release(5, "built"), release(6, "failed")
    ranked = pruning.by_worth([old, back, other, current, fresh, failed])
    assert ranked == [current, back, other, old, failed, fresh]


@pytest.mark.engine
def test_prune_keeps_the_newest_and_the_current(paths: Paths, engine: Engine) -> None:
    one, two, three, four = (built(paths, engine, number) for number in (1, 2, 3, 4))
    other = built(paths, engine, 5, recipe="another")
    retention.promote(paths, engine, one.tag)
    kept_volume, _ = cache_volume(engine, one), cache_volume(engine, two)
    freed = pruning.prune(paths, engine, 2, quiet)
    assert set(freed.tags) == {two.tag, three.tag}
    volumes = engine.client.volumes.list(filters={"label": CACHE_LABEL})
    assert [volume.name for volume in volumes] == [kept_volume]
    assert freed.image_bytes == 200_000 + 300_000
    assert freed.bytes >= freed.image_bytes + 2 * 8192
    assert freed.kept == {}
    records = Releases(paths)
    assert [release.tag for release in records.all()] == [other.tag, one.tag, four.tag]
    for gone in (two, three):
        assert not records.checkpoint(gone).exists()
        assert not records.evidence(gone).exists()
        assert engine.image(gone.image) is None
    for kept in (one, four, other):
        assert (records.checkpoint(kept) / "model.safetensors").is_file()
        assert (records.evidence(kept) / "server.log").is_file()
        assert digest(engine, kept.tag) == kept.image
    assert digest(engine, "sparkpin/tiny:current") == one.image
    assert digest(engine, "sparkpin/tiny:v2") == four.image
    assert pruning.prune(paths, engine, 2, quiet) == pruning.Freed((), 0, 0, {})


@pytest.mark.engine
def test_prune_zero_leaves_only_the_current_release(paths: Paths, engine: Engine) -> None:
    one, two = (built(paths, engine, number) for number in (1, 2))
    retention.promote(paths, engine, one.tag)
    pruning.prune(paths, engine, 0, quiet)
    assert tags(engine) == {
        one.tag,
        "sparkpin/tiny:current",
        "sparkpin/tiny:v2",
        f"sparkpin/stack-cpu:v2-{one.build_key[:12]}",
    }
    assert digest(engine, "sparkpin/tiny:v2") == one.image
    assert two.tag not in [release.tag for release in Releases(paths).all()]
    with pytest.raises(InputError, match="-1"):
        pruning.prune(paths, engine, -1, quiet)


@pytest.mark.engine
def test_prune_leaves_what_a_container_uses(paths: Paths, engine: Engine) -> None:
    first, second = (built(paths, engine, number) for number in (1, 2))
    engine.client.api.import_image_from_data(sleeper(), repository=first.tag.partition(":")[0], tag="sleeper")
    running = digest(engine, "sparkpin/tiny:sleeper")
    assert running is not None
    engine.tag(running, first.tag)
    info = engine.image(running)
    assert info is not None
    Releases(paths).save(dataclasses.replace(first, image=running, diff_ids=info.diff_ids))
    engine.client.containers.run(
        first.tag, ["/bin/sleep", "600"], detach=True, network_mode="none", name="sp-serving", stop_signal="SIGKILL"
    )
    said: list[str] = []
    freed = pruning.prune(paths, engine, 1, said.append)
    assert freed.tags == ()
    assert "sp-serving" in freed.kept[first.tag]
    assert any("sp-serving" in line for line in said)
    assert digest(engine, first.tag) == running
    assert Releases(paths).checkpoint(first).is_dir()
    assert second.tag in tags(engine)
    engine.client.containers.get("sp-serving").remove(force=True)
    assert pruning.prune(paths, engine, 1, quiet).tags == (first.tag,)


@pytest.mark.engine
def test_prune_keeps_a_checkpoint_and_an_image_that_another_release_needs(paths: Paths, engine: Engine) -> None:
    first = built(paths, engine, 1)
    second = built(paths, engine, 2, checkpoint_key=first.checkpoint_key)
    twin = release(
        3, "passed", recipe="another", image=first.image, diff_ids=first.diff_ids, checkpoint_key=first.checkpoint_key
    )
    Releases(paths).save(twin)
    engine.tag(first.tag, twin.tag)
    freed = pruning.prune(paths, engine, 1, quiet)
    assert freed.tags == (first.tag,)
    assert freed.image_bytes == 0
    assert Releases(paths).checkpoint(second).is_dir()
    assert digest(engine, twin.tag) == first.image
    assert f"sparkpin/stack-cpu:v2-{first.build_key[:12]}" in tags(engine), "the twin's image stands on it"


@pytest.mark.engine
def test_prune_leaves_the_work_of_a_build_that_runs_now(
    paths: Paths, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = built(paths, engine, 1)
    load_image(engine, "sparkpin/stack-cpu:base-aaaaaaaaaaaa", [BASE])  # stands below the release: stays for ever
    load_image(engine, "sparkpin/stack-cpu:base-bbbbbbbbbbbb", [file_layer("lonely", b"x" * 50_000)])
    load_image(engine, "somebody/elses:1", [file_layer("theirs", b"y" * 70_000)])
    load_image(engine, "sparkpin/other-home:v2-cccccccccccc", [file_layer("home", b"z" * 10), file_layer("b", b"z")])
    load_image(engine, "sparkpin/stack-cpu:base-dddddddddddd", [file_layer("home", b"z" * 10)])
    young = paths.checkpoints / "tiny-model/0123456789abcdef"
    partial = paths.checkpoints / "tiny-model/.partial-xyz"
    cached = paths.cache / "store/ab/.partial-abc"
    for folder in (young, partial, cached.parent):
        folder.mkdir(parents=True)
    (partial / "half.safetensors").write_bytes(b"half")
    cached.write_bytes(b"half")
    before = tags(engine)
    assert pruning.prune(paths, engine, 1, quiet) == pruning.Freed((), 0, 0, {})
    assert tags(engine) == before
    assert young.is_dir() and partial.is_dir() and cached.is_file()

    ago(monkeypatch, pruning.STALE_AFTER + 60)
    freed = pruning.prune(paths, engine, 1, quiet)
    assert tags(engine) == before - {"sparkpin/stack-cpu:base-bbbbbbbbbbbb"}
    assert freed.image_bytes == 50_000
    assert not young.exists() and not partial.exists() and not cached.exists()
    assert Releases(paths).checkpoint(kept).is_dir()


@pytest.mark.engine
def test_a_prune_that_was_killed_is_completed_by_the_next(
    paths: Paths, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = (built(paths, engine, number) for number in (1, 2))

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pruning, "remove_path", killed)
        pruning.prune(paths, engine, 1, quiet)
    assert {row["tag"]: row["image"] for row in retention.rows(paths, engine)}[first.tag] is None
    assert pruning.prune(paths, engine, 1, quiet).tags == (first.tag,)
    assert not Releases(paths).checkpoint(first).exists()
    assert len(retention.rows(paths, engine)) == 1


@pytest.mark.engine
def test_prune_meets_the_same_left_over_twice(tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = Paths(tmp_path / "project", tmp_path / "state", tmp_path / "state/home")
    left = paths.releases / "tiny/.partial-abc"
    left.mkdir(parents=True)
    ago(monkeypatch, pruning.STALE_AFTER + 60)
    assert pruning.prune(paths, engine, 1, quiet).tags == ()
    assert not left.exists()


def engine_image(ref: str, *diff_ids: str) -> layer_sizes.EngineImage:
    return layer_sizes.EngineImage(ref, (ref,), diff_ids, {}, "2026-01-01T00:00:00Z")


@pytest.mark.parametrize("age", [60, pruning.STALE_AFTER + 60])
def test_root_file_systems_and_unfinished_images_go_once_nothing_needs_them(paths: Paths, age: float) -> None:
    kept = release(2, "passed", diff_ids=(f"sha256:{1:064x}", f"sha256:{2:064x}"))
    Releases(paths).save(kept)
    images = [
        engine_image(kept.tag, *kept.diff_ids),
        engine_image("sparkpin/rootfs:bookworm-aaaaaaaaaaaa", kept.diff_ids[0]),
        engine_image("sparkpin/rootfs:bookworm-bbbbbbbbbbbb", f"sha256:{3:064x}"),
        engine_image("sparkpin/unsealed:v2-cccccccccccc", kept.diff_ids[0]),
    ]
    then = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
    plan = pruning.make_plan(Releases(paths), images, {}, 1, now=then + age)
    gone = () if age < pruning.STALE_AFTER else tuple(image.tags[0] for image in images[2:])
    assert plan.untag == gone


def test_what_a_killed_build_worked_in_goes_once_it_is_old(paths: Paths) -> None:
    left = [paths.work / "context-0123456789ab-x", paths.work / "seal-0123456789ab-y"]
    for folder in left:
        folder.mkdir(parents=True)
    assert pruning.make_plan(Releases(paths), [], {}, 1, now=time.time()).folders == ()
    old = pruning.make_plan(Releases(paths), [], {}, 1, now=time.time() + pruning.STALE_AFTER + 60)
    assert old.folders == tuple(left)


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
    assert jobs.checkpoint_of(paths, release(1)) == folder


def test_a_damaged_checkpoint_that_the_pins_do_not_give_is_told(project: Path, tmp_path: Path) -> None:
    paths = Paths(project, tmp_path / "cache", tmp_path / "home")
    lost = release(1, recipe="scripted-tiny")
    (complete_checkpoint(paths, lost) / "model.safetensors").write_bytes(b"half")
    with pytest.raises(CheckpointError, match="gone or damaged") as caught:
        jobs.checkpoint_of(paths, lost)
    assert "check out the commit" in caught.value.next_step


def test_a_file_with_another_link_frees_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "own").write_bytes(bytes(8192))
    (tmp_path / "store").write_bytes(bytes(1 << 20))
    os.link(tmp_path / "store", folder / "linked")
    assert pruning.remove_path(folder) == 8192
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
