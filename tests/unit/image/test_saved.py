"""What an engine saved and does not hold together, and what is told of it."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

import pytest
from layer_samples import layer, member

from sparkpin.core.errors import BuildError
from sparkpin.image.archive import Joined, Slice
from sparkpin.image.saved import open_saved


def is_refused(archive: Path) -> bool:
    with pytest.raises(BuildError), open_saved(archive):
        pass
    return True


MANIFESTS = [b"[]", b"{}", b"[1]", b"no json", b'[{"Config": "gone"}]']


@pytest.mark.parametrize(
    "data", [b"", b"no tar at all" * 100, b"x" * 512, *(layer([member("manifest.json", text)]) for text in MANIFESTS)]
)
def test_something_else(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.tar").write_bytes(data)
    assert is_refused(tmp_path / "a.tar")


def test_a_part_of_a_file_is_read_like_a_file() -> None:
    part = Slice(io.BytesIO(b"0123456789"), 2, 5)
    assert hashlib.file_digest(part, "sha256").digest() == hashlib.sha256(b"23456").digest()  # type: ignore[arg-type]
    assert part.seek(-2, io.SEEK_END) == 3 and part.read() == b"56"


def test_a_layer_that_ends_too_soon() -> None:
    with pytest.raises(BuildError):
        list(Slice(io.BytesIO(b"short"), 0, 10).chunks())


def test_pieces_that_come_are_a_file_though_some_are_empty() -> None:
    pieces = [b"", b"abc", b"", b"defgh", b""]
    assert Joined(pieces).read() == b"abcdefgh"
    with Joined(pieces) as file:
        assert [file.read(3) for _ in range(4)] == [b"abc", b"def", b"gh", b""]
    file = Joined(pieces)
    assert (file.read(1), file.seek(5), file.tell(), file.read(2)) == (b"a", 5, 5, b"fg")
    with pytest.raises(io.UnsupportedOperation, match="seek to 1 from 7"):
        file.seek(1)
    assert (file.seek(99), file.read(1)) == (8, b"")
