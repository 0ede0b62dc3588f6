"""Debian packages in any year: a mirror that has moved on, and a snapshot archive that keeps all, over real HTTP."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import debian_archive
import pytest
from debian_archive import DAY_AFTER, TIME, DebianArchive
from heard import heard
from stack_samples import stack

from sparkpin.core.errors import IntegrityError, NetworkError
from sparkpin.core.paths import Paths
from sparkpin.fetch import debs, transfer
from sparkpin.fetch.stack import fetch_stack
from sparkpin.fetch.store import LOST, Store
from sparkpin.pins.schema import LockedDeb, StackLock

DATA = {name: f"{name} as it was locked".encode() for name in ("libc6", "python3.11-minimal", "openssl")}


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(tmp_path / "project", tmp_path / "cache", tmp_path / "home")


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that a run would have waited; it does not."""
    seen = list[float]()
    monkeypatch.setattr(transfer, "pause", lambda stop, seconds: seen.extend([seconds] if seconds else []))
    return seen


@pytest.fixture
def archive(monkeypatch: pytest.MonkeyPatch, pauses: list[float]) -> Iterator[DebianArchive]:
    """The mirror that the host's apt names, and the snapshot archive that the setting names."""
    with debian_archive.serve() as archive:
        monkeypatch.setattr(debs, "mirrors_of", lambda suite: archive.mirrors)
        monkeypatch.setenv("SPARKPIN_SNAPSHOT", f"{archive.url}/")
        yield archive


def package(name: str, archive: str = "debian") -> LockedDeb:
    data, pool = DATA[name], "pool/updates/main" if archive == "debian-security" else "pool/main"
    file, sha256 = f"{name}_1%3a2+deb12u1_amd64.deb", hashlib.sha256(data).hexdigest()
    path = f"{pool}/{name[0]}/{name}/{name}_2+deb12u1_amd64.deb"
    return LockedDeb(
        name=name, version="1:2+deb12u1", file=file, size=len(data), sha256=sha256, path=path, archive=archive
    )


LIBC, PYTHON, OPENSSL = package("libc6"), package("python3.11-minimal"), package("openssl", "debian-security")


def fetch(paths: Paths, *rows: LockedDeb) -> int:
    """As of a stack that has nothing else."""
    return fetch_stack(paths, stack(), StackLock(stack="s", inputs="0" * 64, time=TIME, debs=list(rows), wheels=[]))


def is_stored(paths: Paths, deb: LockedDeb) -> bool:
    return Store(paths.store).path(deb.sha256).exists()


def test_a_mirror_that_has_moved_on(paths: Paths, archive: DebianArchive) -> None:
    """One package is where it was; one is gone; one has other bytes under its name; all are what was locked."""
    archive.mirror(LIBC, DATA["libc6"])
    archive.mirror(OPENSSL, b"other bytes")
    archive.snapshot(PYTHON, DATA["python3.11-minimal"])
    archive.snapshot(OPENSSL, DATA["openssl"])
    rows = (LIBC, PYTHON, OPENSSL)
    assert fetch(paths, *rows) == sum(deb.size for deb in rows)
    assert all(Store(paths.store).verified(deb) for deb in rows)
    assert fetch(paths, *rows) == 0, "what is there needs no network"
    assert archive.asked == [
        f"/mirror/debian/{PYTHON.path}",
        f"/archive/debian/{TIME}/{PYTHON.path}",
        f"/mirror/debian-security/{OPENSSL.path}",
        f"/archive/debian-security/{TIME}/{OPENSSL.path}",
        f"/mirror/debian/{LIBC.path}",
    ]
    assert archive.at_once == 1


def test_a_snapshot_that_was_taken_after_the_lock(paths: Paths, archive: DebianArchive) -> None:
    archive.snapshot(LIBC, DATA["libc6"], DAY_AFTER)
    fetch(paths, LIBC)
    assert is_stored(paths, LIBC)


def test_where_the_host_s_apt_names_no_mirror_debian_s_own_is_asked(
    paths: Paths, archive: DebianArchive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Ubuntu, where apt knows no suite of Debian's, or with a folder as the mirror."""
    monkeypatch.setattr(debs, "mirrors_of", lambda suite: [("file:/mirror/debian/", "s")])
    monkeypatch.setattr(debs, "MIRROR", f"{archive.url}/mirror")
    archive.mirror(OPENSSL, DATA["openssl"])
    fetch(paths, OPENSSL)
    assert is_stored(paths, OPENSSL)


def test_the_proxy_of_the_host_s_apt_is_asked(
    paths: Paths, archive: DebianArchive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(debs, "host_apt", lambda *_: f'Acquire::http::Proxy "{archive.url}";\n')
    monkeypatch.setattr(debs, "mirrors_of", lambda suite: [("http://mirror.invalid/debian/", "s")])
    archive.files[f"http://mirror.invalid/debian/{LIBC.path}"] = DATA["libc6"]
    fetch(paths, LIBC)
    assert is_stored(paths, LIBC)


@pytest.mark.parametrize("data", [None, b"other bytes", DATA["libc6"] + b"x"], ids=["gone", "changed", "longer"])
def test_what_nobody_has_is_one_error_that_names_the_places(
    paths: Paths, archive: DebianArchive, data: bytes | None
) -> None:
    """The other packages are fetched all the same, and nothing of it is stored."""
    archive.mirror(PYTHON, DATA["python3.11-minimal"])
    if data:
        archive.mirror(LIBC, data)
    with pytest.raises(IntegrityError if data else NetworkError) as caught:
        fetch(paths, LIBC, PYTHON)
    parts = (LIBC.name, LIBC.version, LIBC.sha256, f"{archive.url}/mirror/debian/pool/main/l/", f"/{TIME}/")
    assert all(word in caught.value.message for word in parts)
    assert LOST in caught.value.next_step
    assert is_stored(paths, PYTHON) and not is_stored(paths, LIBC)
    assert sorted(path.name for path in paths.store.rglob("*") if path.is_file()) == [PYTHON.sha256]


def test_a_busy_archive_is_left_alone_as_long_as_it_asks(
    paths: Paths, archive: DebianArchive, pauses: list[float]
) -> None:
    archive.mirror(LIBC, DATA["libc6"])
    archive.busy[f"/mirror/debian/{LIBC.path}"] = [(429, "7"), (503, "90"), (503, "")]
    fetch(paths, LIBC)
    assert is_stored(paths, LIBC) and pauses == [7.0, 90.0, 4.0]


def test_pauses_have_an_end(paths: Paths, archive: DebianArchive, pauses: list[float]) -> None:
    """A server that never gets ready is given up, and not asked for the next package."""
    for deb in (LIBC, PYTHON):
        archive.busy[f"/mirror/debian/{deb.path}"] = [(503, "300")] * 99
        archive.snapshot(deb, DATA[deb.name])
    with pytest.raises(NetworkError):
        fetch(paths, LIBC, PYTHON)
    assert sum(pauses) <= transfer.PATIENCE and len(archive.asked) <= transfer.TRIES + 4


def test_no_message_has_the_password_of_a_mirror(
    paths: Paths, archive: DebianArchive, monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    """One that answers with other bytes, one that does not answer, and the snapshot archive."""
    server, said = archive.url.replace("://", "://me:secret@"), heard()
    mirrors = [(f"{server}/mirror/debian/", "s"), ("http://me:secret@127.0.0.1:9/", "s")]
    monkeypatch.setattr(debs, "mirrors_of", lambda suite: mirrors)
    monkeypatch.setenv("SPARKPIN_SNAPSHOT", server)
    archive.mirror(LIBC, b"other bytes")
    with pytest.raises(IntegrityError) as caught:
        fetch(paths, LIBC)
    assert pauses and "127.0.0.1:9" in str(caught.value) and "secret" not in f"{caught.value}{said}"
