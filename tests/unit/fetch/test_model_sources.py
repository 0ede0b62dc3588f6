"""The base of a model in a folder of this machine: what cannot be read is told at once, what is known is not read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_samples import (
    ALL,
    HYBRID,
    PIN,
    base_config,
    base_shards,
    fp8_config,
    fp8_shards,
    sample_paths,
    write_repository,
)
from heard import heard

from sparkpin.build.checkpoint import build_checkpoint
from sparkpin.core import files
from sparkpin.core.errors import CheckpointError, DiskError, IntegrityError
from sparkpin.fetch.lock_model import lock_model
from sparkpin.pins import manifests

SHARD = "model-00001-of-00002.safetensors"


class Model:
    """The sample pair in folders, locked; `read` has the files that a build read whole."""

    def __init__(self, root: Path, read: list[int]) -> None:
        self.paths, self.read = sample_paths(root), read
        self.own = write_repository(root / "int4", base_shards(), base_config(), repository="int4")
        fp8 = write_repository(root / "fp8", fp8_shards(), fp8_config(), repository="fp8")
        pin: dict[str, Any] = PIN.model_dump(mode="json", exclude={"name", "packed", "smoke"})
        for name, folder in (("int4", self.own), ("fp8", fp8)):
            pin["repositories"][name] |= {"revision": "unresolved", "folder": str(folder)}
        path = self.paths.project / "pins/models/sample.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(pin))
        self.lock()

    def lock(self) -> None:
        lock_model(self.paths, "sample")

    def build(self, steps: tuple[str, ...] = ALL) -> Path:
        pin = manifests.load_model(self.paths.project, "sample")
        self.read.clear()
        return build_checkpoint(self.paths, pin, manifests.load_model_lock(self.paths.project, pin), steps)

    @property
    def cached_shards(self) -> list[Path]:
        return list(self.paths.models.glob(f"acme/sample-int4/*/{SHARD}"))

    @property
    def cached(self) -> Path:
        [path] = self.cached_shards
        return path

    @property
    def is_untouched(self) -> bool:
        """No checkpoint was begun, and nothing came for one."""
        return not self.paths.home.exists() and not list(self.paths.models.rglob(SHARD))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    read: list[int] = []
    whole = files.sha256_of

    def watched(file: Any) -> str:
        read.append(file.fileno())
        return whole(file)

    monkeypatch.setattr(files, "sha256_of", watched)
    return Model(tmp_path, read)


def test_what_was_found_right_is_not_read_again(model: Model) -> None:
    """But what was removed from the cache."""
    made = model.build(("copy",))
    assert len(model.read) > 3, "once more in their place"
    model.build(HYBRID)
    assert model.read == []
    model.build(("copy", "mtp"))
    assert model.read == [], "though links were made to them since"
    assert not list(model.paths.models.rglob("*.download"))
    made.rename(model.paths.home / "elsewhere")  # its links keep their ctime, and the table its rows
    assert model.build(("copy",)) == made and model.read == []
    model.cached.unlink()
    model.build(ALL)
    assert len(model.read) == 1, "the others are known"


def rewritten(path: Path) -> None:
    """As an editor does."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def in_place(path: Path) -> None:
    seen = path.stat()
    rewritten(path)
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))


def another(path: Path) -> None:
    seen = path.stat()
    new = path.with_name("new")
    new.write_bytes(path.read_bytes())
    in_place(new)
    os.utime(new, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    new.replace(path)


@pytest.mark.parametrize("change", [rewritten, in_place, another])
def test_a_base_that_changed_behind_the_record_is_seen(model: Model, change: Callable[[Path], None]) -> None:
    model.build(("copy",))
    model.build(("copy", "mtp"))
    change(model.cached)
    if change is another:  # the folder's own is right: it takes the place of the wrong one
        model.build(HYBRID)
        assert model.cached.samefile(model.own / SHARD)
        return
    with pytest.raises(IntegrityError, match=rf"{model.own / SHARD}: got size=") as caught:
        model.build(HYBRID)
    assert str(model.own) in caught.value.next_step and not model.cached_shards


def test_a_base_that_changes_while_it_is_copied(model: Model) -> None:
    model.build(("copy",))
    model.build(("copy", "mtp"))
    there = sorted(model.paths.checkpoints.rglob("*"))

    heard(lambda line: in_place(model.cached) if line.startswith("writing model-00001") else None)
    with pytest.raises(CheckpointError, match=SHARD):
        model.build()
    assert sorted(model.paths.checkpoints.rglob("*")) == there, "nothing to go on from"


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def nowhere(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


HARMS = (folder, nowhere, pipe)


@pytest.mark.parametrize("harm", [*HARMS, Path.unlink])
def test_a_source_that_is_no_file_is_told_before_anything_is_linked(model: Model, harm: Callable[[Path], None]) -> None:
    """By a lock, too, unless it is gone: the new lock is of what is there."""
    harm(model.own / SHARD)
    for act in [model.build] if harm is Path.unlink else [model.build, model.lock]:
        with pytest.raises((CheckpointError, IntegrityError), match=str(model.own / SHARD)):
            act()
    assert model.is_untouched


@pytest.mark.parametrize("harm", [nowhere, pipe])
def test_what_is_no_file_in_the_cache_is_replaced(model: Model, harm: Callable[[Path], None]) -> None:
    model.build(("copy",))
    harm(model.cached)
    model.build()
    assert model.cached.samefile(model.own / SHARD)


def test_a_folder_in_the_place_of_a_cached_file_is_one_clear_error(model: Model) -> None:
    """It may be somebody's work; once it is gone, the same command ends well."""
    model.build(("copy",))
    path = model.cached
    folder(path)
    with pytest.raises(DiskError, match=f"{path}: got a folder") as caught:
        model.build()
    assert str(path) in caught.value.next_step
    path.rmdir()
    model.build()
    assert path.samefile(model.own / SHARD)
