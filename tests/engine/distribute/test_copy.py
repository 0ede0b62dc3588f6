"""Images from engine to engine, over a real ssh server too: what the other has is not sent. And checkpoints into
volumes of another engine, by real containers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from carried_release import Source, carried_release, engine_with_url
from fake_image import image_tar
from fake_release import REF, made_release
from newer_engine import newer_root as newer_root
from private_engine import file_layer, load_image, private_engine
from ssh_host import ssh_host

from sparkpin.build.make import checkpoint_of
from sparkpin.checkpoint.content import RECORD, SMALL, TABLE
from sparkpin.core.errors import CheckpointError, DiskError, HostError, IntegrityError, NetworkError
from sparkpin.distribute.engines import Sent, carry, copy
from sparkpin.host.engine import Engine
from sparkpin.host.ssh import engine_at
from sparkpin.releases.container import UID
from sparkpin.releases.record import Release
from sparkpin.releases.volumes import checkpoint_volume, volume_name

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
    sent, _ = copy(source.paths, source.engine, release or source.release, url)
    return sent


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


def test_another_image_under_the_tag_stays(source: Source, other: tuple[Engine, str]) -> None:
    engine, url = other
    image = load_image(engine, source.release.tag, [file_layer("x", b"x")])
    with pytest.raises(IntegrityError, match="has another image under sparkpin/carried:two-"):
        send(source, url)
    assert [one.id for one in engine.client.images.list()] == [image.config_digest]


def test_a_full_disk_over_there(source: Source, tmpfs: Callable[[str], Path]) -> None:
    with private_engine(tmpfs("3m") / "data") as engine:
        url = engine.host["DOCKER_HOST"]
        with pytest.raises(DiskError, match=url):
            send(source, url)


KEY = hashlib.sha256(b"a checkpoint of the tests").hexdigest()
LARGE = "model-00002.safetensors"  # is not hashed at every look
SIZES = {"config.json": 700, "model-00001.safetensors": 5 << 20, LARGE: SMALL + 12345, "sub/tokenizer.json": 0}
TOTAL = sum(SIZES.values())
KILLED_AFTER = """
import os, pickle, sys
from pathlib import Path
from sparkpin.distribute import engines
from sparkpin.host.ssh import engine_at
release, folder, url, limit = pickle.loads(bytes.fromhex(sys.argv[1]))
count = 0
def counted(chunks, sent):
    global count
    for chunk in chunks:
        count += len(chunk)
        if count > limit:
            os.killpg(0, 9)
        yield chunk
engines.counted = counted
with engine_at(url) as engine:
    engines.carry(engine, release, Path(folder))
"""


@dataclass(frozen=True)
class Node:
    """An engine that has the image of a release, with a volume for a checkpoint that lies here in a folder."""

    engine: Engine
    url: str
    release: Release
    folder: Path

    @property
    def volume(self) -> Path:
        """Where its files lie: the engine is on this machine."""
        return Path(self.engine.client.volumes.get(volume_name(KEY)).attrs["Mountpoint"])

    def carry(self, *, deep: bool = False) -> tuple[int, int, int]:
        """Files and bytes that were sent, and files that were there."""
        done = carry(self.engine, self.release, self.folder, deep=deep)
        assert self.whole
        assert not list(self.volume.rglob(".partial-*")) and not self.busy
        return done.sent, done.bytes, done.there

    @property
    def whole(self) -> str | None:
        return checkpoint_volume(self.engine, self.release)

    @property
    def busy(self) -> list[Any]:
        return list(self.engine.containers.list(all=True))

    def killed(self, url: str, limit: int) -> str:
        """What a run said that was killed when it had sent so many bytes."""
        order = pickle.dumps((self.release, str(self.folder), url, limit)).hex()
        line = [sys.executable, "-c", KILLED_AFTER, order]
        done = subprocess.run(line, capture_output=True, text=True, start_new_session=True)
        assert done.returncode == -signal.SIGKILL, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def python_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, str]]:
    with engine_with_url() as (engine, url):
        with_image(engine, tmp_path_factory.mktemp("image"))
        yield engine, url


def with_image(engine: Engine, folder: Path) -> None:
    (folder / "rootfs.tar").write_bytes(image_tar())
    architecture = engine.platform.rpartition("/")[2]
    engine.import_rootfs(folder / "rootfs.tar", REF, architecture=architecture, labels={})


def made_folder(folder: Path) -> Path:
    rows = {}
    for number, (name, size) in enumerate(SIZES.items()):
        path, data = folder / name, random.Random(number).randbytes(size)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        rows[name] = {"size": size, "sha256": hashlib.sha256(data).hexdigest()}
    (folder / RECORD).write_text(json.dumps({"key": KEY, "files": rows}))
    return folder


@pytest.fixture
def node(python_engine: tuple[Engine, str], tmp_path: Path) -> Iterator[Node]:
    engine, url = python_engine
    release = dataclasses.replace(made_release(engine), checkpoint_key=KEY)
    yield Node(engine, url, release, made_folder(tmp_path / "checkpoint"))
    for volume in engine.client.volumes.list():
        volume.remove()


def test_a_checkpoint_is_sent_once_and_looked_at_again(node: Node) -> None:
    assert node.whole is None
    assert node.carry() == (len(SIZES), TOTAL, 0)
    assert {path.name for path in node.volume.iterdir()} == {*(name.split("/")[0] for name in SIZES), RECORD, TABLE}
    for name in (*SIZES, RECORD):
        path = node.volume / name
        assert path.read_bytes() == (node.folder / name).read_bytes()
        assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (UID, 0o444)
    table = (node.volume / TABLE).read_bytes()
    assert node.carry() == (0, 0, len(SIZES)) and (node.volume / TABLE).read_bytes() == table, "nothing is hashed"
    assert node.carry(deep=True) == (0, 0, len(SIZES)) and (node.volume / TABLE).stat().st_size == len(table)


@pytest.mark.parametrize("name", ["config.json", LARGE])
def test_changed_bytes_there_are_found_and_sent_again(node: Node, name: str) -> None:
    node.carry()
    path = node.volume / name
    spoil(path, 0)
    with pytest.raises(CheckpointError, match=name):
        print(node.whole)
    assert node.carry() == (1, SIZES[name], len(SIZES) - 1)
    assert path.read_bytes() == (node.folder / name).read_bytes()


def spoil(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_killed_runs_are_gone_on_from(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over ssh. What they leave is no checkpoint, and costs only the files that it lacks."""
    with ssh_host(tmp_path / "ssh", node.url) as host:
        monkeypatch.setenv("PATH", host.path)
        for limit in (10, 3 << 20, 20 << 20, 8 << 20):  # the third one sends a file or two completely
            node.killed(host.url, limit)
            assert node.whole is None
        assert not (node.volume / RECORD).exists()
        with engine_at(host.url) as engine:
            done = carry(engine, node.release, node.folder)
    assert done.sent == 2 and done.there == len(SIZES) - 2, "the rest was there"
    assert node.carry() == (0, 0, len(SIZES))
    for name in SIZES:
        assert (node.volume / name).read_bytes() == (node.folder / name).read_bytes()


def test_a_release_with_its_checkpoint_over_ssh(
    source: Source, other: tuple[Engine, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, url = other
    checkpoint = checkpoint_of(source.paths, source.release)
    names = json.loads((checkpoint / RECORD).read_text())["files"]
    with ssh_host(tmp_path / "ssh", url) as host:
        monkeypatch.setenv("PATH", host.path)
        args = (source.paths, source.engine, source.release, host.url)
        came = re.compile(r"Accepted publickey")
        before = len(came.findall((host.folder / "log").read_text()))
        sent, carried = copy(*args, checkpoint=True)
        assert (sent.sent, carried) == (3, Sent(len(names), 0, sum(row["size"] for row in names.values())))
        assert len(came.findall((host.folder / "log").read_text())) == before + 1, "one login"
        sent, carried = copy(*args, checkpoint=True)
        assert (sent.sent, carried) == (0, Sent(0, len(names)))
        assert checkpoint_volume(engine, source.release)
        host.refuse()
        with pytest.raises(NetworkError, match="Permission denied"):
            send(source, host.url)
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "platform", "linux/arm64")  # no such machine at hand
        with pytest.raises(HostError, match="is linux/arm64"):
            copy(source.paths, source.engine, source.release, url, checkpoint=True)
        assert send(source, url) == Sent(0, 3), "the image alone goes anywhere"
    monkeypatch.undo()
    shutil.rmtree(checkpoint)
    with pytest.raises(CheckpointError, match="is gone"):
        copy(source.paths, source.engine, source.release, url, checkpoint=True)
