"""Fixtures: the fake image in the machine's engine, and a release of it. Only what they made themselves is removed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_image import image_tar

from sparkpin.engine import Engine
from sparkpin.paths import Paths
from sparkpin.releases import Demands, Release, tag_of

CHECKS = ("completion", "chat", "chat-stream", "tool-call", "tool-call-stream", "tool-answer", "long-text")
CHECKS += ("chat-sampled", "mods")
KEY = "ab" * 32
REF = tag_of("fake", "base", KEY)


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
    image = engine.image(REF)
    assert image
    yield engine
    for volume in engine.client.volumes.list(filters={"label": f"sparkpin.cache={image.config_digest}"}):
        volume.remove(force=True)
    engine.untag(REF)


@pytest.fixture
def paths(project: Path, tmp_path: Path) -> Paths:
    return Paths(project, tmp_path / "cache", tmp_path / "home")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def release(fake_engine: Engine) -> Release:
    image = fake_engine.image(REF)
    assert image
    return Release(
        tag=REF,
        recipe="fake",
        stage="base",
        stack="cpu",
        model="scripted-tiny",
        key=KEY,
        build_key="cd" * 32,
        image=image.config_digest,
        diff_ids=image.diff_ids,
        size=image.size,
        checkpoint_key="ef" * 32,
        argv=(
            "vllm",
            "serve",
            "/model",
            "--host",
            "127.0.0.1",
            "--port",
            "8000",
            "--served-model-name",
            "scripted-tiny",
        ),
        env={},
        created="2026-01-01T00:00:00Z",
        build_seconds=1.0,
        demands=Demands(checks=CHECKS, mods=("vllm-cpu",), acceptance_floor=None, scripted=True),
        inputs={},
    )
