"""The store keeps whole files only, notices every changed byte, and says when the disk is full."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from heard import heard

from sparkpin.core.errors import IntegrityError
from sparkpin.fetch.store import Store, find_missing
from sparkpin.pins.schema import LockedFile

DATA = b"wheel" * 1000


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def source(tmp_path: Path, data: bytes = DATA) -> tuple[Path, LockedFile]:
    path = tmp_path / "a-1.0-py3-none-any.whl"
    path.write_bytes(data)
    sha256 = hashlib.sha256(data).hexdigest()
    return path, LockedFile(name="a", version="1.0", file=path.name, size=len(data), sha256=sha256)


def test_what_was_added_can_be_verified_and_linked(tmp_path: Path, store: Store) -> None:
    path, file = source(tmp_path)
    assert not store.has(file)
    assert store.add(path, file) == tmp_path / "store" / file.sha256[:2] / file.sha256
    assert store.has(file)
    assert store.verified(file).read_bytes() == DATA
    store.link(file, tmp_path / "context/wheels/a.whl")
    assert (tmp_path / "context/wheels/a.whl").stat().st_ino == store.path(file.sha256).stat().st_ino


def test_other_bytes_than_locked_are_not_kept(tmp_path: Path, store: Store) -> None:
    path, file = source(tmp_path)
    path.write_bytes(DATA + b"!")
    with pytest.raises(IntegrityError) as caught:
        store.add(path, file)
    assert file.sha256 in str(caught.value) and hashlib.sha256(DATA + b"!").hexdigest() in str(caught.value)
    assert [p for p in (tmp_path / "store").rglob("*") if p.is_file()] == []


def test_one_changed_byte_is_noticed(tmp_path: Path, store: Store) -> None:
    path, file = source(tmp_path)
    stored = store.add(path, file)
    damaged = bytearray(DATA)
    damaged[2500] ^= 1
    stored.write_bytes(damaged)
    assert store.has(file), "the cheap look cannot see it"
    for use in (lambda: store.verified(file), lambda: store.link(file, tmp_path / "b")):
        with pytest.raises(IntegrityError) as caught:
            use()
        assert file.sha256 in str(caught.value) and hashlib.sha256(damaged).hexdigest() in str(caught.value)
    assert not (tmp_path / "b").exists()


def test_a_damaged_file_is_reported_by_the_name_that_people_know(tmp_path: Path, store: Store) -> None:
    path, file = source(tmp_path)
    stored, said = store.add(path, file), heard()
    stored.write_bytes(bytes(len(DATA)))
    assert find_missing([(file, stored)]) == [file]
    [line] = said
    assert path.name in line and str(stored) in line and not stored.exists()
