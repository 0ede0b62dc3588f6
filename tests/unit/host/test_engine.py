"""The engine behind its API and its CLI. Tests with the marker need a running one; no network is used."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkpin.core.errors import DiskError, EngineError, HostError
from sparkpin.host import buildkit, daemon
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
        buildkit.build(context(tmp_path / "c", "FROM scratch\nCOPY file /\n"), "--tag", "x:y")


class Answers(http.server.BaseHTTPRequestHandler):
    """An engine that refuses every image with `message`, and never answers for the container `silent`."""

    message = ""

    def do_GET(self) -> None:
        if "silent" in self.path:
            time.sleep(5)
        is_version = self.path == "/version"
        body = json.dumps({"ApiVersion": "1.41"} if is_version else {"message": self.message}).encode()
        self.send_response(200 if is_version else 500)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def answering() -> Iterator[Engine]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Engine.at(f"tcp://127.0.0.1:{server.server_port}")
        server.shutdown()


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("write /x: no space left on device", DiskError),
        ("error mounting /x to rootfs: permission denied: unknown", EngineError),
        ("OCI hook failed: PermissionError: [Errno 13] Permission denied", EngineError),
        ("permission denied while trying to connect to the registry", EngineError),
        ("dial tcp: Connection refused", EngineError),
    ],
)
def test_what_an_engine_refuses_is_in_its_own_words(
    message: str, kind: type[Exception], answering: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers, so neither rights to talk to it nor its start are what is missing."""
    monkeypatch.setattr(Answers, "message", message)
    with pytest.raises(kind) as failed:
        answering.image("x:y")
    assert type(failed.value) is kind and message in str(failed.value)


def test_a_question_is_not_waited_for_as_long_as_work(answering: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "QUESTION_SECONDS", 0.5)
    began = time.monotonic()
    with pytest.raises(EngineError), engines.engine_errors():
        answering.containers.get("silent")
    assert time.monotonic() - began < 4


def test_a_socket_that_may_not_be_opened_is_a_lack_of_rights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/socket")
        monkeypatch.setattr(socket.socket, "connect", refuse)
        with pytest.raises(EngineError) as failed:
            Engine.connect()
    assert failed.value.next_step == daemon.JOIN_GROUP


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
