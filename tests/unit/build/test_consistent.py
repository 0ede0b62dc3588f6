"""A release that is not what its record says is refused, before anything runs or becomes current."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from evidence_samples import Sample, make_sample
from tampers import MENDED, RUN

from sparkpin.build.consistent import require_consistent
from sparkpin.checkpoint import content
from sparkpin.checkpoint.content import RECORD, Hashes
from sparkpin.core.errors import CheckpointError, SparkpinError
from sparkpin.releases.record import Releases

LARGE, SIZE = "model.safetensors", 3 << 20


@pytest.fixture
def sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sample:
    """With a checkpoint of a small and a large file."""
    monkeypatch.setattr(content, "SMALL", 1 << 20)
    made = make_sample(tmp_path)
    folder = Releases(made.paths).checkpoint(made.release)
    folder.mkdir(parents=True)
    rows = {}
    for name, data in (("config.json", b'{"a": 1}'), (LARGE, b"0123456789abcdef" * (SIZE // 16))):
        (folder / name).write_bytes(data)
        rows[name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / RECORD).write_text(json.dumps({"key": made.release.checkpoint_key, "files": rows}))
    return made


@pytest.mark.parametrize("name", [*RUN, *MENDED])
def test_what_was_changed_by_hand_is_refused(sample: Sample, name: str) -> None:
    assert [file.name for file in require_consistent(sample.paths, sample.release, finished=True)] == ["config.json"]
    (RUN | MENDED)[name](sample.paths, sample.release)
    with pytest.raises(SparkpinError) as caught:
        require_consistent(sample.paths, Releases(sample.paths).get(sample.release.tag), finished=True)
    assert caught.value.next_step and caught.value.exit_code in (4, 5, 9)


def test_a_checkpoint_that_is_to_be_made_anew_is_no_fault(sample: Sample) -> None:
    MENDED["a file less in the checkpoint"](sample.paths, sample.release)
    require_consistent(sample.paths, sample.release)


def overwrite(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"#")


def test_a_large_file_is_hashed_once_and_again_when_it_was_written(sample: Sample) -> None:
    folder, hashed = Releases(sample.paths).checkpoint(sample.release), list[Path]()

    def look(hashing: Callable[[Path], object] | None = hashed.append, *, deep: bool = False) -> list[str]:
        files = require_consistent(sample.paths, sample.release, finished=True, hashing=hashing, deep=deep)
        return [file.name for file in files]

    path = folder / LARGE
    times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    look(None)
    assert Hashes.here(sample.paths).known(path) is None, "what costs time waits for a promote"
    look()
    look()
    assert hashed == [path]
    os.utime(path)
    look()
    assert hashed == [path, path], "with another time it is hashed again, and holds"
    times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    overwrite(path, SIZE // 30)
    os.utime(path, ns=times)  # ctime shows it
    look(None)  # which a link changes, too: so that costs no hash before a promote
    for deep in (False, True):
        with pytest.raises(CheckpointError, match=LARGE):
            look(deep=deep)
    os.utime(path)
    with pytest.raises(CheckpointError, match=LARGE):
        look(None)


def test_another_file_in_its_place_is_hashed_without_a_promote(sample: Sample) -> None:
    path = Releases(sample.paths).checkpoint(sample.release) / LARGE
    require_consistent(sample.paths, sample.release, finished=True, hashing=lambda path: None)
    times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    data = path.read_bytes()
    path.rename(path.with_name("model.old"))
    path.write_bytes(data[:-1] + b"#")
    path.with_name("model.old").unlink()
    os.utime(path, ns=times)
    with pytest.raises(CheckpointError, match=LARGE):
        require_consistent(sample.paths, sample.release, finished=True)
