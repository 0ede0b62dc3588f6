"""Images from engine to engine, over a real ssh server too: what the other has is not sent."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import ANY

import pytest
from carried_release import Source, carried_release, engine_with_url
from private_engine import private_engine
from ssh_host import ssh_host

from sparkpin.build.make import checkpoint_of
from sparkpin.checkpoint.content import RECORD
from sparkpin.core.errors import CheckpointError, DiskError, InputError, NetworkError
from sparkpin.distribute.engines import Sent, copy
from sparkpin.host.engine import Engine
from sparkpin.releases import remote
from sparkpin.releases.record import Release

HEADERS = 64 << 10  # bytes: configurations and headers of an archive, whatever its layers


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Source]:
    with carried_release(tmp_path_factory.mktemp("source"), python=True) as source:
        yield source


@pytest.fixture
def other() -> Iterator[tuple[Engine, str]]:
    with engine_with_url() as found:
        yield found


def send(source: Source, url: str, release: Release | None = None) -> Sent:
    return copy(source.paths, source.engine, release or source.release, url)


def test_only_what_is_missing_is_sent(source: Source, other: tuple[Engine, str]) -> None:
    engine, url = other
    base, one, two = source.releases
    first = send(source, url, base)
    assert (first.sent, first.there) == (2, 0) and first.bytes > 1_000_000
    second = send(source, url, one)
    assert (second.sent, second.there) == (1, 2) and second.bytes < HEADERS
    third = send(source, url, two)  # adds a label and no layer
    assert (third.sent, third.there) == (0, 3) and third.bytes < HEADERS
    assert send(source, url, two) == Sent(0, 3)
    for release in source.releases:
        for ref in (release.tag, f"sparkpin/stack-carried:{release.stage}-{release.build_key[:12]}"):
            image = engine.image(ref)
            assert image and (image.config_digest, image.diff_ids) == (release.image, release.diff_ids)
    assert not list(source.paths.work.glob("saved-*"))


def test_a_full_disk_over_there(source: Source, tmpfs: Callable[[str], Path]) -> None:
    with private_engine(tmpfs("3m") / "data") as engine:
        url = engine.host["DOCKER_HOST"]
        with pytest.raises(DiskError, match=url):
            send(source, url)


def test_a_release_with_its_checkpoint_over_ssh(
    source: Source, other: tuple[Engine, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = other[1]
    checkpoint = checkpoint_of(source.paths, source.release)
    with ssh_host(tmp_path / "ssh", url) as host:
        monkeypatch.setenv("PATH", host.path)
        sent = copy(source.paths, source.engine, source.release, host.url, checkpoint=True)
        assert sent == Sent(3, 0, ANY, remote.checkpoint_at(host.url, source.release))
        there = Path(sent.checkpoint)
        assert (there / RECORD).read_bytes() == (checkpoint / RECORD).read_bytes()
        host.refuse()
        with pytest.raises(NetworkError, match="Permission denied"):
            send(source, host.url)
    with pytest.raises(InputError, match="ssh://"):  # before anything is sent
        copy(source.paths, source.engine, source.release, url, checkpoint=True)
    shutil.rmtree(checkpoint)
    with pytest.raises(CheckpointError, match="is gone"):
        copy(source.paths, source.engine, source.release, host.url, checkpoint=True)
