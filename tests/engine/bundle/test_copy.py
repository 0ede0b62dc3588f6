"""Images from engine to engine, over a real ssh server too: what the other has is not sent."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from carried_release import Source, carried_release, engine_with_url
from private_engine import file_layer, load_image, quiet
from ssh_host import ssh_host

from sparkpin.bundle import copy as transfer
from sparkpin.bundle.copy import Sent, copy
from sparkpin.core.errors import DiskError, EngineError, IntegrityError, NetworkError
from sparkpin.core.paths import Paths
from sparkpin.host.daemon import Daemon, start_engine, stop_engine
from sparkpin.host.engine import Engine
from sparkpin.host.ssh import engine_at
from sparkpin.releases.record import Release

HEADERS = 64 << 10  # bytes: configurations and headers of an archive, whatever its layers


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Source]:
    with carried_release(tmp_path_factory.mktemp("source")) as source:
        yield source


@pytest.fixture
def other() -> Iterator[tuple[Engine, str]]:
    with engine_with_url() as found:
        yield found


def send(source: Source, url: str, release: Release | None = None) -> Sent:
    return copy(source.paths, source.engine, release or source.release, url, quiet)


def digests(engine: Engine, release: Release) -> tuple[str | None, tuple[str, ...]]:
    image = engine.image(release.tag)
    return (image.config_digest, image.diff_ids) if image else (None, ())


def test_only_what_is_missing_is_sent(source: Source, other: tuple[Engine, str]) -> None:
    engine, url = other
    base, one, two = source.releases
    first = send(source, url, base)
    assert (first.layers, first.skipped) == (2, 0) and first.bytes > 1_000_000
    second = send(source, url, one)
    assert (second.layers, second.skipped) == (1, 2) and second.bytes < HEADERS
    third = send(source, url, two)  # adds a label and no layer
    assert (third.layers, third.skipped) == (0, 3) and third.bytes < HEADERS
    assert send(source, url, two) == Sent(0, 3, 0)
    for release in source.releases:
        assert digests(engine, release) == (release.image, release.diff_ids)
        internal = f"sparkpin/stack-carried:{release.stage}-{release.build_key[:12]}"
        image = engine.image(internal)
        assert image and image.config_digest == release.image
    assert not list(source.paths.work.glob("saved-*"))


def test_over_ssh(source: Source, other: tuple[Engine, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, url = other
    with ssh_host(tmp_path / "ssh", DOCKER_HOST=url) as host:
        monkeypatch.setenv("PATH", host.path)
        first = send(source, host.url, source.releases[0])
        second = send(source, host.url)
        assert (first.layers, first.skipped, second.layers, second.skipped) == (2, 0, 1, 2)
        assert second.bytes < HEADERS < first.bytes
        assert send(source, host.url) == Sent(0, 3, 0)
        assert digests(engine, source.release) == (source.release.image, source.release.diff_ids)
        host.refuse()
        with pytest.raises(NetworkError, match=r"ssh does not get to .*Permission denied") as caught:
            send(source, host.url)
        assert "without a password" in caught.value.next_step


def test_ssh_hosts_without_docker_or_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ssh_host(tmp_path / "bare", PATH="/nowhere") as host:
        monkeypatch.setenv("PATH", host.path)
        with pytest.raises(EngineError, match="there is no docker"), engine_at(host.url):
            pass
    monkeypatch.undo()
    with ssh_host(tmp_path / "asleep", DOCKER_HOST="unix:///nowhere.sock") as host:
        monkeypatch.setenv("PATH", host.path)
        with pytest.raises(EngineError, match=r"its Docker engine does not .*Cannot connect"), engine_at(host.url):
            pass
        (host.folder / "known").write_text("")
        with pytest.raises(NetworkError, match="Host key verification failed"), engine_at(host.url):
            pass


def test_another_image_under_the_tag_stays(source: Source, other: tuple[Engine, str]) -> None:
    engine, url = other
    image = load_image(engine, source.release.tag, [file_layer("x", b"x")])
    with pytest.raises(IntegrityError, match="has another image under sparkpin/carried:two-") as caught:
        send(source, url)
    assert f"docker -H {url} rmi {source.release.tag}" in caught.value.next_step
    assert digests(engine, source.release)[0] == image.config_digest
    assert len(engine.client.images.list()) == 1


def test_an_engine_that_wants_more_gets_all(
    source: Source, other: tuple[Engine, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine whose images promise layers that its archive reader wants all the same: here, one that has none."""
    engine, url = other
    monkeypatch.setattr(transfer, "present", lambda *args: 2)
    sent = send(source, url)
    assert (sent.layers, sent.skipped) == (3, 0)
    assert digests(engine, source.release) == (source.release.image, source.release.diff_ids)


def test_a_full_disk_over_there(source: Source, tmpfs: Callable[[str], Path]) -> None:
    folder = Path(tempfile.mkdtemp(prefix="sp-", dir="/tmp"))
    daemon = Daemon.private(folder, tmpfs("3m") / "data")
    try:
        start_engine(Paths(folder, folder / "cache", folder / "home"), quiet, daemon)
        with pytest.raises(DiskError, match="the Docker engine's disk is full") as caught:
            send(source, f"unix://{daemon.socket}")
        assert str(daemon.socket) in caught.value.message and "free space there" in caught.value.next_step
    finally:
        stop_engine(daemon, quiet)
        shutil.rmtree(folder)
