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


def fake_docker(folder: Path, *, version: str, buildx: bool) -> None:
    folder.mkdir()
    script = folder / "docker"
    answer = "exit 0" if buildx else "exit 1"
    script.write_text(f'#!/bin/sh\n[ "$1" = buildx ] && {answer}\necho \'{{"Version":"{version}"}}\'\n')
    script.chmod(0o755)


@pytest.mark.parametrize(
    ("first", "second", "chosen"),
    [
        (("28.2.2", False), ("20.10.24+dfsg1", False), ("two", "build")),
        (("28.2.2", True), ("20.10.24+dfsg1", False), ("one", "buildx", "build")),
        (("22.06", False), ("28.2.2", True), ("one", "build")),
        (("17.05", False), ("29.0.0", True), ("two", "buildx", "build")),
    ],
)
def test_the_cli_is_one_that_can_use_buildkit(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    first: tuple[str, bool],
    second: tuple[str, bool],
    chosen: tuple[str, ...],
) -> None:
    for name, (version, buildx) in (("one", first), ("two", second)):
        fake_docker(tmp_path / name, version=version, buildx=buildx)
    monkeypatch.setenv("PATH", f"{tmp_path / 'one'}{os.pathsep}{tmp_path / 'two'}{os.pathsep}/bin")
    found = buildkit.builder.__wrapped__()
    assert found[: len(chosen)] == (str(tmp_path / chosen[0] / "docker"), *chosen[1:])


def test_no_cli_with_buildkit_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_docker(tmp_path / "one", version="28.2.2", buildx=False)
    monkeypatch.setenv("PATH", str(tmp_path / "one"))
    with pytest.raises(HostError, match=r"one/docker 28\.2\.2"):
        buildkit.builder.__wrapped__()
