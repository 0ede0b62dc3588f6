"""Files are whole or absent, and a lock dies with its holder."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from held_lock import held_lock

from sparkpin.core import files
from sparkpin.core.errors import BusyError, DiskError, InputError


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    files.write_json(path, {"a": 1})
    with pytest.raises(RuntimeError), files.atomic_file(path) as file:
        file.write(b"half")
        raise RuntimeError
    with pytest.raises(RuntimeError), files.atomic_folder(tmp_path / "checkpoint") as folder:
        (folder / "shard").write_bytes(b"x")
        raise RuntimeError
    assert path.read_text() == '{\n  "a": 1\n}\n'
    assert list(tmp_path.iterdir()) == [path]


def test_many_who_write_one_file_at_once_all_succeed(tmp_path: Path) -> None:
    def write(number: int) -> None:
        for _ in range(30):
            with files.atomic_file(tmp_path / "a") as file:
                file.write(b"%d" % number)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(write, range(8)))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_folder_that_cannot_be_made_is_one_clear_error() -> None:
    """Under /proc nobody makes one, whoever asks; and what is missing elsewhere stays what it is."""
    for opened in (files.lock, files.atomic_file):
        with pytest.raises(DiskError, match="/proc/nope/a"), opened(Path("/proc/nope/a/b")):
            pass
    with pytest.raises(FileNotFoundError), files.disk_errors(Path("/proc")):
        Path("/proc/nope").read_text()


def test_sweep_removes_only_partial_names(tmp_path: Path) -> None:
    (tmp_path / (files.PARTIAL + "a")).write_text("x")
    (tmp_path / (files.PARTIAL + "b")).mkdir()
    (tmp_path / "kept").write_text("x")
    files.sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_lock_is_free_once_its_holder_was_killed_and_a_shared_one_keeps_out_who_wants_it_alone(
    tmp_path: Path,
) -> None:
    path = tmp_path / "lock"
    with held_lock(path), pytest.raises(BusyError), files.lock(path, wait=False):
        pass
    shared = held_lock(path, shared=True), files.lock(path, shared=True, wait=False)
    with shared[0], shared[1], pytest.raises(BusyError), files.lock(path, wait=False):
        pass
    with files.lock(path, wait=False), pytest.raises(BusyError), files.lock(path, shared=True, wait=False):
        pass


def test_a_full_disk_is_one_clear_error(small_disk: Path) -> None:
    with pytest.raises(DiskError), files.atomic_file(small_disk / "big") as file:
        file.write(b"x" * 2_000_000)
    assert list(small_disk.iterdir()) == []


def test_an_output_is_a_file_in_a_folder_that_is_there(tmp_path: Path) -> None:
    assert files.output_file("--out", str(tmp_path / "page.html")) == tmp_path / "page.html"
    for path in (tmp_path, tmp_path / "away/page.html"):
        with pytest.raises(InputError):
            files.output_file("--out", str(path))
    assert not (tmp_path / "away").exists()


def test_a_file_that_is_there_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "some page.html"
    for content in (b"", b"precious"):
        path.write_bytes(content)
        with pytest.raises(InputError):
            files.output_file("--out", str(path))
        assert path.read_bytes() == content
    os.mkfifo(tmp_path / "pipe")  # reading it would wait for ever
    with pytest.raises(InputError):
        files.output_file("--out", str(tmp_path / "pipe"))


@pytest.mark.parametrize(("blamed", "other"), [("source", "target"), ("target", "source")])
def test_what_may_not_be_opened_is_named(blamed: str, other: str, tmp_path: Path) -> None:
    """An unreadable source is not the target's fault."""
    with pytest.raises(DiskError) as caught, files.disk_errors(tmp_path / "target"):
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / blamed / "a"))
    assert str(tmp_path / blamed) in caught.value.message and str(tmp_path / other) not in caught.value.message
    assert ("chown" in caught.value.next_step) == (blamed == "target")
