"""Bytes on their way to the disk: gathered, linked or copied; and files that end too early."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path

import pytest

from sparkpin.checkpoint import write
from sparkpin.checkpoint.repository import ByteRange
from sparkpin.checkpoint.write import STEP, gather, link_or_copy
from sparkpin.core.errors import IntegrityError

DATA = bytes(range(256)) * 40_961  # ten chunks and an odd rest


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(DATA)
    return path


def gathered(target: Path, first: bytes, *ranges: ByteRange, stop: threading.Event | None = None) -> bytes:
    """What is in the file; its hash is compared here."""
    sha256 = gather(target, first, ranges, stop or threading.Event())
    data = target.read_bytes()
    assert sha256 == hashlib.sha256(data).hexdigest()
    return data


def ranges_of(source: Path) -> list[ByteRange]:
    return [
        ByteRange(source, 3, 1_000_001),
        ByteRange(source, 0, 1),
        ByteRange(source, 1_000_001, len(DATA)),
        ByteRange(source, 7, 7),
    ]


WANTED = DATA[3:1_000_001] + DATA[:1] + DATA[1_000_001:]


@pytest.mark.parametrize("first", [0, 1, 5000, STEP + 1])
def test_gathering_header_and_ranges_of_any_length(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    monkeypatch.setattr(write, "STEP", 1 << 20)  # what is on disk leaves the page cache on the way
    header = bytes(first)
    assert gathered(tmp_path / "target", header, *ranges_of(source)) == header + WANTED


def test_gathering_a_source_that_ends_too_early(tmp_path: Path, source: Path) -> None:
    with pytest.raises(IntegrityError, match=f"{source}: .* {len(DATA)} .* {len(DATA) + 1} "):
        gathered(tmp_path / "target", b"", ByteRange(source, 5, len(DATA) + 1))


def test_what_is_there_is_not_written_through(tmp_path: Path, source: Path) -> None:
    other, target = tmp_path / "other", tmp_path / "target"
    other.write_bytes(b"precious")
    os.link(other, target)
    with pytest.raises(FileExistsError):
        link_or_copy(source, target)
    assert other.read_bytes() == b"precious"
