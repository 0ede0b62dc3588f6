"""Pruning in a real engine of the tests' own: what stays and what goes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from heard import heard
from made_releases import BASE, built, digest, keep_bytes, release, tags
from private_engine import load_image, sleeper

from sparkpin.core import locks
from sparkpin.core.files import atomic_file
from sparkpin.core.paths import Paths
from sparkpin.host.engine import Engine
from sparkpin.prune import plan as pruning
from sparkpin.prune.plan import Pruned, PruneOptions
from sparkpin.releases import current as retention
from sparkpin.releases.container import CACHE_LABEL, cache_volume
from sparkpin.releases.kept_inputs import KeptInputs
from sparkpin.releases.record import Release, Releases

pytest_plugins = ["empty_engine"]


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(tmp_path / "project", tmp_path / "cache", tmp_path / "home")


@pytest.fixture
def engine(empty_engine: Engine) -> Engine:
    return empty_engine


def prune(paths: Paths, engine: Engine, keep: int, *, later: float = 0) -> Pruned:
    """later: seconds from now, as if all there is had been made that long ago."""
    return pruning.prune(paths, engine, PruneOptions(keep=keep, now=time.time() + later))


def tags_of(releases: Iterable[Release]) -> list[str]:
    return [release.tag for release in releases]


def test_prune_keeps_the_newest_and_the_current(paths: Paths, engine: Engine) -> None:
    one, two, three, four = (built(paths, engine, number) for number in (1, 2, 3, 4))
    other = built(paths, engine, 5, recipe="another")
    retention.promote(paths, engine, one)
    kept_volume, _ = cache_volume(engine, one), cache_volume(engine, two)
    freed = prune(paths, engine, 2)
    assert set(tags_of(freed.removed)) == {two.tag, three.tag}
    volumes = engine.client.volumes.list(filters={"label": CACHE_LABEL})
    assert [volume.name for volume in volumes] == [kept_volume]
    assert len(freed.volumes) == 1
    assert set(tags_of([one.release for one in freed.verdicts if one.reasons])) == {one.tag, four.tag, other.tag}
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
    assert digest(engine, "sparkpin/tiny:v2") == four.image
    again = prune(paths, engine, 2)
    assert (again.removed, again.tags, again.volumes, dict(again.files)) == ([], (), (), {})


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
    freed = prune(paths, engine, 1)
    assert not freed.removed
    [verdict] = [verdict for verdict in freed.verdicts if verdict.release.tag == first.tag]
    assert verdict.reasons == ("in use by the container sp-serving",)
    assert digest(engine, first.tag) == running
    assert Releases(paths).checkpoint(first).is_dir()
    assert second.tag in tags(engine)
    container = engine.client.containers.get("sp-serving")
    options = PruneOptions(keep=1, now=time.time(), dry_run=True, ignored=[container.id])
    assert tags_of(pruning.prune(paths, engine, options).removed) == [first.tag]
    container.remove(force=True)
    assert tags_of(prune(paths, engine, 1).removed) == [first.tag]


def test_prune_keeps_a_checkpoint_and_an_image_that_another_release_needs(paths: Paths, engine: Engine) -> None:
    first = built(paths, engine, 1)
    second = built(paths, engine, 2, checkpoint_key=first.checkpoint_key)
    twin = release(
        3, "passed", recipe="another", image=first.image, diff_ids=first.diff_ids, checkpoint_key=first.checkpoint_key
    )
    Releases(paths).save(twin)
    engine.tag(first.tag, twin.tag)
    freed = prune(paths, engine, 1)
    assert tags_of(freed.removed) == [first.tag]
    assert Releases(paths).checkpoint(second).is_dir()
    assert digest(engine, twin.tag) == first.image
    assert f"sparkpin/stack-cpu:v2-{first.build_key[:12]}" in tags(engine), "the twin's image stands on it"


def test_a_prune_that_was_killed_is_completed_by_the_next(
    paths: Paths, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = (built(paths, engine, number) for number in (1, 2))

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(pruning, "remove_path", killed)
        prune(paths, engine, 1)
    assert {row["tag"]: row["image"] for row in retention.list_images(paths, engine).rows}[first.tag] is None
    assert tags_of(prune(paths, engine, 1).removed) == [first.tag]
    assert not Releases(paths).checkpoint(first).exists()
    assert len(retention.list_images(paths, engine).rows) == 1


def snapshot(paths: Paths, engine: Engine) -> tuple[object, ...]:
    """All that a dry run must leave as it is."""
    volumes = sorted(volume.name for volume in engine.client.volumes.list())
    entries = [path for root in (paths.home, paths.cache) for path in sorted(root.rglob("*"))]
    return tags(engine), volumes, [(path, path.lstat().st_ino, path.lstat().st_ctime_ns) for path in entries]


def write(path: Path, size: int) -> Path:
    with atomic_file(path) as out:
        out.write(os.urandom(size))
    return path


def test_a_dry_run_changes_nothing_and_names_what_the_real_run_then_removes(paths: Paths, engine: Engine) -> None:
    records = Releases(paths)
    model = write(paths.models / "repository/model.safetensors", 200_000)
    one, two, three = (
        built(paths, engine, number, inputs={"recipes/tiny.yaml": keep_bytes(paths, b"x" * 9000 * number)})
        for number in (1, 2, 3)
    )
    for made in (one, two, three):
        os.link(model, records.checkpoint(made) / "base.safetensors")  # stays with the model
        cache_volume(engine, made)
    load_image(engine, "sparkpin/stack-cpu:base-eeeeeeeeeeee", [BASE])
    with locks.claim(paths):
        pass  # as each build: the lock's folder stays
    before, options = snapshot(paths, engine), PruneOptions(keep=1, now=time.time())
    dry_run = dataclasses.replace(options, dry_run=True)
    with claimed(paths):  # a dry run waits for nobody
        dry = pruning.prune(paths, engine, dry_run)
    assert snapshot(paths, engine) == before
    assert tags_of(dry.removed) == [two.tag, one.tag]
    assert pruning.prune(paths, engine, options) == dry
    assert all(not path.exists() for files in dry.files.values() for path in files)
    assert records.all() == [three] and model.stat().st_nlink == 2
    assert not pruning.prune(paths, engine, dry_run).files


# Runs at the same time

HOLD = """\
import sys, time
from pathlib import Path
from sparkpin.core import locks as claims
from sparkpin.core.paths import Paths
with claims.claim(Paths(*map(Path, sys.argv[1:]))):
    print("held", flush=True)
    time.sleep(600)
"""


@contextlib.contextmanager
def claimed(paths: Paths) -> Iterator[subprocess.Popen[str]]:
    """Another process, which holds what a build holds."""
    argv = [sys.executable, "-c", HOLD, str(paths.project), str(paths.cache), str(paths.home)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout and holder.stdout.readline() == "held\n"
            yield holder
        finally:
            holder.kill()


@pytest.mark.parametrize("common", ["home", "cache"])
def test_what_a_running_build_takes_over_from_a_release_stays(
    paths: Paths, engine: Engine, tmp_path: Path, common: str
) -> None:
    """Prune waits for the build, and sees the release that it has recorded then."""
    inputs = {"recipes/tiny.yaml": keep_bytes(paths, b"recipe")}
    first = built(paths, engine, 1, inputs=inputs)
    second = built(paths, engine, 2)
    elsewhere = dataclasses.replace(paths, **{{"home": "cache", "cache": "home"}[common]: tmp_path / "elsewhere"})
    with claimed(elsewhere) as holder:

        def act(line: str) -> None:
            if "waiting" in line:
                built(paths, engine, 3, inputs=inputs)
                holder.kill()

        heard(act)
        freed = prune(paths, engine, 1)
    assert tags_of(freed.removed) == [second.tag, first.tag] and len(freed.files["checkpoints"]) == 2
    assert "kept inputs" not in freed.files and KeptInputs.of(paths).store.path(inputs["recipes/tiny.yaml"]).is_file()
