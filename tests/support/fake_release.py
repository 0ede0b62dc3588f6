"""Fixtures: the fake image in the machine's engine, and a release of it. Only what they made themselves is removed."""

from __future__ import annotations

import dataclasses
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fake_image import image_tar
from heard import heard
from watched import free_port

from sparkpin.core.paths import Paths
from sparkpin.core.tags import tag_of
from sparkpin.host.engine import Engine
from sparkpin.releases.compile_caches import volume_name
from sparkpin.releases.container import HOME_LABEL
from sparkpin.releases.record import Demands, Release
from sparkpin.serve import service
from sparkpin.serve.address import AddressOptions
from sparkpin.serve.served import Served

CHECKS = ("completion", "chat", "chat-stream", "tool-call", "tool-call-stream", "tool-answer", "long-text")
CHECKS += ("chat-sampled", "mods")
NAMED = ("--served-model-name", "scripted-tiny")
KEY = uuid.uuid4().hex * 2  # another run of the tests may use the same engine
REF = tag_of("fake", "base", KEY)
BUILD_KEY = KEY[::-1]


@pytest.fixture(scope="session")
def fake_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    try:
        engine = Engine.connect()
        engine.client.ping()
    except Exception as error:
        pytest.skip(f"no Docker engine answers ({error}); `invoke doctor` starts one")
    tar = tmp_path_factory.mktemp("image") / "rootfs.tar"
    tar.write_bytes(image_tar())
    engine.import_rootfs(tar, REF, architecture="amd64" if os.uname().machine == "x86_64" else "arm64", labels={})
    yield engine
    for volume in engine.client.volumes.list(filters={"name": volume_name(BUILD_KEY)}):
        volume.remove(force=True)
    engine.untag(REF)


@pytest.fixture
def paths(project: Path, tmp_path: Path) -> Paths:
    return Paths(project, tmp_path / "cache", tmp_path / "home")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return made_checkpoint(tmp_path / "checkpoint")


def made_checkpoint(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@dataclass(frozen=True)
class Standing:
    """A server that the tests of a file look at, and leave as it is. said: as it was started."""

    paths: Paths
    release: Release
    checkpoint: Path
    served: Served
    said: list[str]


@pytest.fixture(scope="module")
def standing(fake_engine: Engine, shared_project: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standing]:
    folder = tmp_path_factory.mktemp("standing")
    paths, checkpoint = Paths(shared_project, folder / "cache", folder / "home"), made_checkpoint(folder / "checkpoint")
    release, said = made_release(fake_engine), heard()
    served = service.start(paths, fake_engine, release, checkpoint, options=AddressOptions(free_port()))
    yield Standing(paths, release, checkpoint, served, said)
    service.stop(paths, fake_engine, None)


@pytest.fixture
def release(fake_engine: Engine) -> Release:
    return made_release(fake_engine)


@pytest.fixture
def newer(fake_engine: Engine, release: Release) -> Iterator[Release]:
    """Another release of the recipe; the same image is enough."""
    key = release.key[::-1]
    newer = dataclasses.replace(release, key=key, tag=tag_of("fake", "base", key))
    fake_engine.tag(release.tag, newer.tag)
    yield newer
    fake_engine.untag(newer.tag)


@dataclass(frozen=True)
class FakeSite:
    """The fake release and state folders of a test's own. port: a free one."""

    paths: Paths
    engine: Engine
    release: Release
    checkpoint: Path
    port: int

    def start(self, release: Release | None = None, **options: Any) -> Served:
        """Serve it, or another one of the same image. options: those of `service.start`, and of the address."""
        names = [name for name in options if name in AddressOptions.__dataclass_fields__]
        address = AddressOptions(**{name: options.pop(name) for name in names})
        release = release or self.release
        return service.start(self.paths, self.engine, release, self.checkpoint, options=address, **options)

    def containers(self) -> list[Any]:
        """Servers and proxies of its data directory."""
        filters = {"label": f"{HOME_LABEL}={self.paths.home}"}
        return list(self.engine.client.containers.list(all=True, filters=filters, ignore_removed=True))

    def faulty(self, fault: str) -> Release:
        return dataclasses.replace(self.release, env={"FAKE_VLLM": fault})


@pytest.fixture
def site(fake_engine: Engine, paths: Paths, release: Release, checkpoint: Path) -> Iterator[FakeSite]:
    """What a test serves is removed."""
    made = FakeSite(paths, fake_engine, release, checkpoint, free_port())
    yield made
    for container in made.containers():
        container.kill() if container.status == "running" else None
    service.stop(paths, fake_engine, None)


def made_release(engine: Engine) -> Release:
    image = engine.image(REF)
    assert image
    return Release(
        tag=REF,
        recipe="fake",
        stage="base",
        stack="cpu",
        model="scripted-tiny",
        key=KEY,
        build_key=BUILD_KEY,
        image=image.config_digest,
        diff_ids=image.diff_ids,
        size=image.size,
        checkpoint_key="ef" * 32,
        argv=("vllm", "serve", "/model", *("--host", "127.0.0.1", "--port", "8000"), *NAMED),
        env={},
        created="2026-01-01T00:00:00Z",
        build_seconds=1.0,
        demands=Demands(checks=CHECKS, mods=("vllm-cpu",), acceptance_floor=None, scripted=True),
        inputs={},
    )
