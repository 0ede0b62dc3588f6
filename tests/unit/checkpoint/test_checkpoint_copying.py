"""Bytes on their way to the disk: past the page cache, through it, by the kernel; and files that end too early."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from sparkpin.checkpoint import copying, gathering
from sparkpin.checkpoint.copying import ByteRange, RangeReader, append, link_or_copy
from sparkpin.checkpoint.gathering import BLOCK, PIECE, DirectFile, GatheringStopped, gather
from sparkpin.core.errors import IntegrityError

DATA = bytes(range(256)) * 40_961  # ten chunks and an odd rest


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(DATA)
    return path


def copied(target: Path, *runs: ByteRange) -> bytes:
    with RangeReader() as reader, target.open("wb") as file:
        for run in runs:
            append(file.fileno(), reader, run)
    return target.read_bytes()


def gathered(target: Path, first: bytes, *runs: ByteRange, stop: threading.Event | None = None) -> bytes:
    """What is in the file; its hash is compared here."""
    size = len(first) + sum(run.end - run.begin for run in runs)
    sha256 = gather(target, size, first, runs, stop or threading.Event())
    data = target.read_bytes()
    assert sha256 == hashlib.sha256(data).hexdigest()
    return data


def runs_of(source: Path) -> list[ByteRange]:
    return [
        ByteRange(source, 3, 1_000_001),
        ByteRange(source, 0, 1),
        ByteRange(source, 1_000_001, len(DATA)),
        ByteRange(source, 7, 7),
    ]


WANTED = DATA[3:1_000_001] + DATA[:1] + DATA[1_000_001:]


def test_runs_are_appended_wherever_they_begin(tmp_path: Path, source: Path) -> None:
    assert copied(tmp_path / "target", *runs_of(source)) == WANTED


@pytest.mark.parametrize("first", [0, 1, 5000, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE])
def test_gathering_header_and_runs_of_any_length(tmp_path: Path, source: Path, first: int) -> None:
    header = (b"header" * PIECE)[:first]
    assert gathered(tmp_path / "target", header, *runs_of(source)) == header + WANTED


@pytest.mark.parametrize(
    "length", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, len(DATA)]
)
def test_gathering_files_of_any_size(tmp_path: Path, source: Path, length: int) -> None:
    assert gathered(tmp_path / "target", b"", ByteRange(source, 0, length)) == DATA[:length]


def test_gathering_many_small_runs(tmp_path: Path, source: Path) -> None:
    runs = [ByteRange(source, begin, begin + 4999) for begin in range(5_000_001, 0, -5003)]
    assert gathered(tmp_path / "target", b"{}", *runs) == b"{}" + b"".join(DATA[r.begin : r.end] for r in runs)


def test_gathering_on_a_file_system_without_direct_writes(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some refuse at open, some at the first write: both are played here."""
    real_open, real_write = os.open, os.pwrite

    def refuse_open(path: object, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *mode)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse_open)
    assert gathered(tmp_path / "open", b"first", *runs_of(source)) == b"first" + WANTED
    monkeypatch.setattr(os, "open", real_open)

    def refuse_write(file: int, data: memoryview, offset: int) -> int:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT and offset >= PIECE:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_write(file, data, offset)

    monkeypatch.setattr(os, "pwrite", refuse_write)
    assert gathered(tmp_path / "write", b"first", *runs_of(source)) == b"first" + WANTED


def refusing(code: int) -> Callable[..., int]:
    """A fallocate that fails once."""
    answers = iter([code])

    def fallocate(file: int, mode: int, begin: int, size: int) -> int:
        ctypes.set_errno(next(answers, 0))
        return -1 if ctypes.get_errno() else 0

    return fallocate


def test_blocks_are_set_aside_where_the_file_system_can(tmp_path: Path) -> None:
    with DirectFile(tmp_path / "target", 10 * PIECE) as file:
        if not file.direct:
            pytest.skip(f"{tmp_path} is on a file system without direct writes; try another TMPDIR")
        seen = (tmp_path / "target").stat()
    assert (seen.st_size, seen.st_blocks * 512 >= seen.st_size) == (10 * PIECE, True)


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EINTR])
def test_gathering_where_no_blocks_can_be_set_aside(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(gathering, "FALLOCATE", refusing(code))
    assert gathered(tmp_path / "target", b"first", *runs_of(source)) == b"first" + WANTED


def test_too_few_blocks_are_told_before_the_first_byte(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering, "FALLOCATE", refusing(errno.ENOSPC))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No space left"):
        gathered(tmp_path / "target", b"", *runs_of(source))
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("most", [BLOCK * 100, 1000])
def test_gathering_when_writes_are_cut_short(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Also at a place where a write past the page cache cannot go on."""
    real, target = os.pwrite, tmp_path / "target"

    def short(file: int, data: memoryview, offset: int) -> int:
        direct = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT
        if not direct or not most % BLOCK:
            return real(file, data[: most if direct else None], offset)
        with target.open("r+b") as other:
            return real(other.fileno(), data[:most], offset)

    monkeypatch.setattr(os, "pwrite", short)
    assert gathered(target, b"first", *runs_of(source)) == b"first" + WANTED


def test_gathering_tells_of_a_full_disk(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        gathered(tmp_path / "target", b"", *runs_of(source))


def test_gathering_a_source_that_ends_too_early_and_a_wrong_size(tmp_path: Path, source: Path) -> None:
    with pytest.raises(IntegrityError, match=f"source: ends at byte {len(DATA)}, wanted {len(DATA) + 1}"):
        gathered(tmp_path / "target", b"", ByteRange(source, 5, len(DATA) + 1))
    with pytest.raises(IntegrityError, match="10 bytes were gathered, wanted 11"):
        gather(tmp_path / "target", 11, b"", [ByteRange(source, 0, 10)], threading.Event())


def test_gathering_stops(tmp_path: Path, source: Path) -> None:
    stop = threading.Event()
    stop.set()
    with pytest.raises(GatheringStopped):
        gathered(tmp_path / "target", b"", *runs_of(source), stop=stop)


@pytest.mark.parametrize("code", ["EXDEV", "EINVAL", "ENOSYS", "EOPNOTSUPP"])
def test_where_the_kernel_refuses_bytes_are_read_and_written(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    """A file system that refuses is played: none is at hand."""
    asked = []

    def refuse(*args: object) -> int:
        asked.append(args)
        raise OSError(getattr(errno, code), code)

    monkeypatch.setattr(os, "copy_file_range", refuse)
    assert copied(tmp_path / "target", *runs_of(source)) == WANTED
    assert len(asked) == 3


def test_the_kernel_may_refuse_in_the_middle_and_copy_less_than_it_is_asked(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.copy_file_range, []

    def sometimes(src: int, dst: int, count: int, offset: int) -> int:
        calls.append(count)
        return real(src, dst, min(count, 99_999), offset) if len(calls) < 4 else 0

    monkeypatch.setattr(os, "copy_file_range", sometimes)
    assert copied(tmp_path / "target", *runs_of(source)) == WANTED
    assert len(calls) > 4


def test_other_errors_are_not_hidden(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "copy_file_range", fail)
    with pytest.raises(OSError, match="Input/output error"):
        copied(tmp_path / "target", *runs_of(source))


def test_a_source_that_ends_too_early(tmp_path: Path, source: Path) -> None:
    with pytest.raises(IntegrityError, match=f"source: ends at byte {len(DATA)}, wanted {len(DATA) + 1}"):
        copied(tmp_path / "target", ByteRange(source, 5, len(DATA) + 1))


def test_more_files_than_stay_open(tmp_path: Path) -> None:
    runs = []
    for number in range(200):
        (tmp_path / f"{number}").write_bytes(b"%03d" % number)
        runs.append(ByteRange(tmp_path / f"{number}", 0, 3))
    before = len(os.listdir("/proc/self/fd"))
    assert copied(tmp_path / "target", *runs, runs[0]) == b"".join(b"%03d" % number for number in range(200)) + b"000"
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_link_is_a_link(tmp_path: Path, source: Path) -> None:
    link_or_copy(source, tmp_path / "folder" / "target")
    assert source.samefile(tmp_path / "folder" / "target")


@pytest.mark.parametrize("code", ["EXDEV", "EPERM", "EMLINK"])
def test_where_links_cannot_go_blocks_are_shared_or_copied(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    asked = []

    def refuse(*args: object) -> None:
        raise OSError(getattr(errno, code), code)

    def clone(file: object, request: int, other: int) -> int:
        asked.append(request)
        raise OSError(errno.EOPNOTSUPP, "no clones here")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(fcntl, "ioctl", clone)
    target = tmp_path / "target"
    link_or_copy(source, target)
    assert target.read_bytes() == DATA
    assert not source.samefile(target)
    assert asked == [copying.FICLONE]


def test_a_link_that_fails_otherwise_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        link_or_copy(tmp_path / "nothing", tmp_path / "target")
