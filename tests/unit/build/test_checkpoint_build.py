"""Building checkpoints: exact bytes, and what is left when something goes wrong."""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_samples as samples
import pytest
from checkpoint_samples import ALL, HYBRID, PIN
from heard import heard

from sparkpin.build.checkpoint import build_checkpoint, plan_checkpoint
from sparkpin.checkpoint import write
from sparkpin.checkpoint.content import OWN, RECORD, TABLE, Hashes
from sparkpin.checkpoint.plan import make_plan
from sparkpin.checkpoint.write import checkpoint_folder
from sparkpin.core.errors import CheckpointError, DiskError, IntegrityError, SparkpinError
from sparkpin.core.files import PARTIAL, sha256_file
from sparkpin.core.paths import Paths
from sparkpin.pins.schema import ModelLock

INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
Folders = dict[str, Path]


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return samples.sample_paths(tmp_path)


@pytest.fixture
def folders(paths: Paths) -> Folders:
    return samples.write_sample(paths)


@pytest.fixture
def lock(folders: Folders) -> ModelLock:
    return samples.lock_of(folders)


def expected_tensors(*, hybrid: bool) -> dict[str, tuple[str, str, tuple[int, ...], bytes]]:
    fp8 = {name: spec for tensors in samples.fp8_shards().values() for name, spec in tensors.items()}
    wanted = {}
    for file, tensors in samples.base_shards().items():
        for name, spec in tensors.items():
            module = name.removesuffix(".weight")
            if not (hybrid and module in samples.MODULES):
                wanted[name] = (file, *spec, samples.data_of("int4", name, spec))
                continue
            for taken in (name, f"{module}.weight_scale_inv"):
                wanted[taken] = (file, *fp8[taken], samples.data_of("fp8", taken, fp8[taken]))
    return wanted


def no_partials(folder: Path) -> bool:
    return not list(folder.rglob(f"{PARTIAL}*"))


def test_copy_is_the_published_repository_by_links(paths: Paths, folders: Folders, lock: ModelLock) -> None:
    made = build_checkpoint(paths, PIN, lock, ("copy",))
    wanted = samples.tree(folders["int4"])
    assert {name: data for name, data in samples.tree(made).items() if name != RECORD} == wanted
    assert all((made / name).samefile(folders["int4"] / name) for name in wanted)


def test_a_plan_removes_no_damaged_file(
    paths: Paths, folders: Folders, lock: ModelLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is replaced once the right bytes are there; here nobody has them."""
    config, said = folders["int4"] / "config.json", heard()
    config.chmod(0o644)
    config.write_bytes(b"damaged")

    def refuse(*_: object, **__: object) -> None:
        raise IntegrityError("nobody has it")

    monkeypatch.setattr("sparkpin.fetch.transfer.fetch", refuse)
    with pytest.raises(SparkpinError):
        plan_checkpoint(paths, PIN, lock, HYBRID)
    assert config.read_bytes() == b"damaged" and any("is damaged" in line for line in said)


@pytest.mark.parametrize("steps", [HYBRID, ALL])
def test_hybrid_is_exact(paths: Paths, folders: Folders, lock: ModelLock, steps: tuple[str, ...]) -> None:
    published = samples.tree(folders["int4"])
    made = build_checkpoint(paths, PIN, lock, steps)
    assert samples.read_tensors(made) == expected_tensors(hybrid=True)
    assert samples.tree(folders["int4"]) == published, "the published repository was written into"

    index = json.loads((made / INDEX).read_text())
    listed = {n: t for n, t in expected_tensors(hybrid=True).items() if "mtp" in steps or not n.startswith("mtp.")}
    assert index["weight_map"] == {name: tensor[0] for name, tensor in listed.items()}
    assert index["metadata"] == {"total_size": sum(len(tensor[3]) for tensor in listed.values()), "made_by": "acme"}

    config = samples.base_config()
    config["quantization_config"]["extra_config"] |= dict.fromkeys(samples.MODULES, samples.ENTRY)
    assert json.loads((made / "config.json").read_text()) == config


def test_record_says_how_it_was_made(paths: Paths, folders: Folders, lock: ModelLock) -> None:
    made = build_checkpoint(paths, PIN, lock, HYBRID)
    record = json.loads((made / "sparkpin.json").read_text())
    assert record["key"][:16] == made.name
    fp8 = record["sources"]["fp8"]
    assert (fp8["repo"], fp8["revision"]) == ("acme/sample-fp8", "b" * 40)
    donor = samples.read_tensors(folders["fp8"])
    wanted = {name: hashlib.sha256(tensor[3]).hexdigest() for name, tensor in donor.items() if "shared_expert" in name}
    assert fp8["tensors"] == wanted
    base = record["sources"]["int4"]["files"]
    assert base == {name: sha256_file(folders["int4"] / name)[0] for name in (FIRST, SECOND, INDEX, "config.json")}
    assert record["steps"] == [{"step": "copy"}, {"step": "hybrid", "rules": [samples.RULE]}]
    names = {path.name for path in made.iterdir()} - {"sparkpin.json"}
    assert set(record["files"]) == names
    for name, entry in record["files"].items():
        assert (entry["sha256"], entry["size"]) == sha256_file(made / name)


def test_a_base_that_is_a_checkpoint_of_ours_does_not_lend_its_record(paths: Paths, folders: Folders) -> None:
    for name in OWN:
        (folders["int4"] / name).write_text(f"{name} of the base")
    made = build_checkpoint(paths, PIN, samples.lock_of(folders), ALL)
    assert [(folders["int4"] / name).read_text() for name in OWN] == [f"{name} of the base" for name in OWN]
    assert json.loads((made / RECORD).read_text())["key"][:16] == made.name
    assert not (made / TABLE).exists()


def test_complete_checkpoint_needs_no_repositories(paths: Paths, lock: ModelLock) -> None:
    made = build_checkpoint(paths, PIN, lock, ALL)
    shutil.rmtree(paths.cache)
    said = heard()
    assert build_checkpoint(paths, PIN, lock, ALL) == made
    assert said == []


@pytest.mark.parametrize("harmed", [FIRST, "pytorch_model.bin", RECORD])
def test_damaged_checkpoint_is_built_again(paths: Paths, lock: ModelLock, harmed: str) -> None:
    """A file of another size, one too many, a record that is none."""
    made = build_checkpoint(paths, PIN, lock, ALL)
    wanted = samples.tree(made)
    (made / harmed).unlink(missing_ok=True)
    (made / harmed).write_text("{")
    assert build_checkpoint(paths, PIN, lock, ALL) == made
    assert samples.tree(made) == wanted and no_partials(paths.home)


def test_a_shard_that_is_not_what_was_written_is_not_kept(
    paths: Paths, lock: ModelLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that loses bytes is played by the test."""
    right = write.gather

    def lossy(path: Path, *args: Any) -> str:
        sha256 = right(path, *args)
        os.truncate(path, path.stat().st_size - 1)
        return sha256

    monkeypatch.setattr(write, "gather", lossy)
    with pytest.raises(CheckpointError):
        build_checkpoint(paths, PIN, lock, HYBRID)
    monkeypatch.undo()
    assert not checkpoint_folder(paths, PIN, lock, HYBRID).exists()
    made = build_checkpoint(paths, PIN, lock, HYBRID)
    assert samples.read_tensors(made) == expected_tensors(hybrid=True)


def test_copies_where_links_cannot_go(
    paths: Paths, folders: Folders, lock: ModelLock, monkeypatch: pytest.MonkeyPatch
) -> None:

    def refuse(source: object, target: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    made = build_checkpoint(paths, PIN, lock, ALL)
    assert samples.read_tensors(made) == expected_tensors(hybrid=True)
    assert not (made / samples.EXTRA).samefile(folders["int4"] / samples.EXTRA)
    assert {path.stat().st_mode & 0o777 for path in made.iterdir()} == {0o444}


fork = multiprocessing.get_context("fork")


def built_elsewhere(root: Path, told: Any, *, stop: bool) -> None:
    """In a process of its own. stop: for ever in the middle of the second shard, when the first is in the table."""
    paths, right = samples.sample_paths(root), write.gather

    def stopping(path: Path, *args: Any) -> str:
        if not path.name.startswith("model-00002"):
            return right(path, *args)
        path.write_bytes(b"half")
        first = path.with_name(FIRST)
        while not (first.exists() and Hashes.here(paths).known(first)):
            time.sleep(0.001)
        told.send("writing")
        time.sleep(600)
        raise AssertionError("nobody killed it")

    if stop:
        write.gather = stopping
    told.send(build_checkpoint(paths, PIN, samples.lock_of(samples.sample_folders(paths)), ALL))


def start(root: Path, *, stop: bool) -> tuple[Any, Any]:
    """The process, and where it says what it has built."""
    ours, theirs = fork.Pipe()
    process = fork.Process(target=built_elsewhere, args=(root, theirs), kwargs={"stop": stop})
    process.start()
    return process, ours


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """The folder that a run left which was killed in the middle of the second shard."""
    paths = samples.sample_paths(tmp_path)
    lock = samples.lock_of(samples.write_sample(paths))
    process, told = start(tmp_path, stop=True)
    assert told.recv() == "writing"
    process.kill()
    process.join()
    folder = checkpoint_folder(paths, PIN, lock, ALL)
    assert not folder.exists()
    partial = write.partial_folder(folder)
    assert {path.name for path in partial.iterdir()} == {FIRST, f"{SECOND}.unfinished"}, "nothing to load"
    return partial


def build_again(tmp_path: Path) -> tuple[Path, list[str]]:
    paths, said = samples.sample_paths(tmp_path), heard()
    made = build_checkpoint(paths, PIN, samples.lock_of(samples.sample_folders(paths)), ALL)
    assert samples.read_tensors(made) == expected_tensors(hybrid=True)
    assert no_partials(paths.home)
    return made, said


def test_killed_build_goes_on_at_the_first_unfinished_shard(tmp_path: Path, killed: Path) -> None:
    finished = (killed / FIRST).stat().st_ino
    made, said = build_again(tmp_path)
    assert (made / FIRST).stat().st_ino == finished
    assert [line for line in said if line.startswith("writing")] == [f"writing {SECOND} (2 of 2, 0.0 MB)"]
    resumed = samples.tree(made)
    shutil.rmtree(made)
    assert samples.tree(build_again(tmp_path)[0]) == resumed


@pytest.mark.parametrize("is_table_lost", [False, True])
def test_a_finished_shard_is_hashed_before_it_is_trusted(tmp_path: Path, killed: Path, is_table_lost: bool) -> None:
    """A disk that lost a bit without a trace in ctime is played by the table, which may also be lost itself."""
    hashes = Hashes.here(samples.sample_paths(tmp_path))
    hashes.note(killed / FIRST, "0" * 64)
    hashes.save()
    if is_table_lost:
        hashes.path.write_text("[")
    _, said = build_again(tmp_path)
    assert len([line for line in said if line.startswith("writing")]) == 2


def test_what_a_killed_run_of_other_steps_left_goes(tmp_path: Path, killed: Path) -> None:
    paths = samples.sample_paths(tmp_path)
    build_checkpoint(paths, PIN, samples.lock_of(samples.sample_folders(paths)), HYBRID)
    assert not killed.exists()


def test_two_runs_at_once_build_it_once(tmp_path: Path) -> None:
    paths = samples.sample_paths(tmp_path)
    lock = samples.lock_of(samples.write_sample(paths))
    runs = [start(tmp_path, stop=False) for _ in range(2)]
    made = checkpoint_folder(paths, PIN, lock, ALL)
    assert [told.recv() for _, told in runs] == [made, made]
    for process, _ in runs:
        process.join()
        assert process.exitcode == 0
    assert list((paths.checkpoints / "sample").iterdir()) == [made]


@pytest.fixture
def small_disk(tmpfs: Callable[[str], Path]) -> Path:
    """A file system of 24 MB."""
    return tmpfs("24m")


def test_disk_is_checked_before_the_first_byte(small_disk: Path) -> None:
    paths = samples.sample_paths(small_disk)
    lock = samples.lock_of(samples.write_sample(paths))
    with pytest.raises(DiskError, match=r"need 6[0-9,]+ bytes in .*, 2[0-9,]+ are free"):
        build_checkpoint(paths, PIN, lock, ALL)
    assert not paths.checkpoints.exists()


def test_what_a_killed_run_had_begun_counts_as_free_room(paths: Paths) -> None:
    folders = samples.write_sample(paths, scale=10_000)
    lock, plan = samples.lock_of(folders), make_plan(samples.listings_of(folders), PIN, ALL)
    folder = checkpoint_folder(paths, PIN, lock, ALL)
    needed = write.disk_needed(folder, folders["int4"], plan)
    write.partial_folder(folder).mkdir(parents=True)
    (write.partial_folder(folder) / f"{SECOND}.unfinished").write_bytes(bytes(8192))
    assert write.disk_needed(folder, folders["int4"], plan) == needed - 8192


def test_disk_that_fills_up_in_the_middle(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparkpin.core.files.require_space", lambda *args: None)
    paths = samples.sample_paths(small_disk)
    lock = samples.lock_of(samples.write_sample(paths, scale=100_000))
    filler = small_disk / "filler"
    filler.write_bytes(bytes(shutil.disk_usage(small_disk).free - 4_000_000))
    with pytest.raises(DiskError, match=f"cannot write to {small_disk}/.*: No space left"):  # also the table's place
        build_checkpoint(paths, PIN, lock, ALL)
    assert not checkpoint_folder(paths, PIN, lock, ALL).exists()
    filler.unlink()
    build_checkpoint(paths, PIN, lock, ALL)
    assert no_partials(paths.home)
