"""The engine behind its API and its CLI. Tests with the marker need a running one; no network is used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sparkpin.core.errors import DiskError, EngineError, HostError
from sparkpin.host import buildkit
from sparkpin.host import engine as engines
from sparkpin.host.engine import Engine


def context(folder: Path, dockerfile: str) -> Path:
    folder.mkdir()
    (folder / "Dockerfile").write_text(dockerfile)
    (folder / "file").write_text("content\n")
    return folder


def test_no_engine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
    with pytest.raises(EngineError) as raised:
        Engine.connect()
    assert "unix:///nonexistent/docker.sock" in raised.value.message


def test_an_engine_that_went_away_is_told_by_a_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
    with pytest.raises(EngineError, match="does not reach the engine"):
        buildkit.build(context(tmp_path / "c", "FROM scratch\nCOPY file /\n"), "x:y", say=print)


@pytest.mark.parametrize(
    ("text", "kind", "same"),
    [
        ("write /x: no space left on device", DiskError, True),
        ("('Connection aborted.', PermissionError(13, 'Permission denied'))", EngineError, False),
        ("('Connection aborted.', ConnectionRefusedError(111, 'Connection refused'))", EngineError, False),
        ("error mounting /x to rootfs: permission denied: unknown", EngineError, True),
    ],
)
def test_an_engine_s_errors_are_told_apart(text: str, kind: type[Exception], same: bool) -> None:
    error = engines.plain_error(text)
    assert type(error) is kind and (text in error.message) == same


def fake_docker(folder: Path, *, builds: bool) -> str:
    folder.mkdir()
    script = folder / "docker"
    script.write_text(f'#!/bin/sh\n[ "$1 $DOCKER_BUILDKIT" = "build 1" ] && exit {int(not builds)}\n')
    script.chmod(0o755)
    return str(script)


def test_the_cli_is_one_that_can_use_buildkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_docker(tmp_path / "one", builds=False)
    second = fake_docker(tmp_path / "two", builds=True)
    monkeypatch.setenv("PATH", f"{tmp_path / 'one'}{os.pathsep}{tmp_path / 'two'}{os.pathsep}/bin")
    assert buildkit.builder.__wrapped__() == second
    monkeypatch.setenv("PATH", str(tmp_path / "one"))
    with pytest.raises(HostError):
        buildkit.builder.__wrapped__()
