"""Which engine is meant, when one is started, and what it answers. tests/engine/host has real ones."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_machine import DEBIAN, root_with

from sparkpin.core.errors import DiskError, EngineError, HostError
from sparkpin.core.paths import Paths
from sparkpin.host import buildkit, daemon, preflight
from sparkpin.host import engine as engines
from sparkpin.host.engine import Engine, engine_of


class Answers(http.server.BaseHTTPRequestHandler):
    """An engine that tells of itself, refuses every image with `message`, and is silent on the container `silent`."""

    message = ""
    options = ("name=seccomp,profile=default",)

    def do_GET(self) -> None:
        if "silent" in self.path:
            time.sleep(5)
        of_itself = self.path.endswith(("/version", "/info"))
        told = {"ApiVersion": "1.41", "Version": "20.10", "SecurityOptions": self.options}
        body = json.dumps(told if of_itself else {"message": self.message}).encode()
        self.send_response(200 if of_itself else 500)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """Of an engine."""
    with socketserver.ThreadingUnixStreamServer(str(tmp_path / "docker.sock"), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"unix://{tmp_path}/docker.sock"
        server.shutdown()


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    """Where nothing may be started."""
    monkeypatch.setattr(daemon.subprocess, "Popen", None)
    return Paths(tmp_path, tmp_path / "cache", tmp_path / "home")


def name_engine(url: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *, by_context: bool) -> None:
    """By the variable, or by a context of Docker's CLI, as `docker context use` leaves it."""
    monkeypatch.setenv("DOCKER_HOST", url)
    if not by_context:
        return
    monkeypatch.delenv("DOCKER_HOST")
    monkeypatch.setenv("DOCKER_CONFIG", str(folder))
    meta = folder / f"contexts/meta/{hashlib.sha256(b'away').hexdigest()}/meta.json"
    meta.parent.mkdir(parents=True)
    meta.write_text(json.dumps({"Name": "away", "Metadata": {}, "Endpoints": {"docker": {"Host": url}}}))
    (folder / "config.json").write_text('{"currentContext": "away"}')


@pytest.mark.parametrize("by_context", [False, True])
@pytest.mark.parametrize("named", ["unix:///nowhere/docker.sock", "ssh://root@elsewhere", "rootless"])
def test_a_named_engine_that_cannot_be_used_is_one_clear_error(
    named: str, by_context: bool, paths: Paths, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the way back to this machine's own."""
    monkeypatch.setattr(Answers, "options", (*Answers.options, "name=rootless"))
    meant = url if named == "rootless" else named
    name_engine(meant, paths.project / "config", monkeypatch, by_context=by_context)
    with pytest.raises(HostError, match=meant) as caught:
        engine_of(paths)
    assert daemon.USE_OWN in caught.value.next_step
    row, _ = preflight.engine(DEBIAN)
    assert (row.state, row.runnable) == ("MISSING", False), "although root could start another one"
    assert Engine.at(url).info["SecurityOptions"], "but an image can be sent to it"


def test_only_root_starts_an_engine(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOCKER_HOST")
    monkeypatch.setattr(daemon, "OWN", f"unix://{paths.project}/none.sock")
    monkeypatch.setattr(daemon.os, "geteuid", lambda: 1000)
    with pytest.raises(HostError) as caught:
        daemon.start_engine(paths)
    assert caught.value.next_step == daemon.start_command() and caught.value.next_step.startswith("sudo ")
    assert list(paths.project.iterdir()) == []


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("write /x: no space left on device", DiskError),
        ("error mounting /x to rootfs: permission denied: unknown", EngineError),
        ("OCI hook failed: PermissionError: [Errno 13] Permission denied", EngineError),
        ("dial tcp: Connection refused", EngineError),
    ],
)
def test_what_an_engine_refuses_is_in_its_own_words(
    message: str, kind: type[Exception], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers, so neither rights to talk to it nor its start are what is missing."""
    monkeypatch.setattr(Answers, "message", message)
    with pytest.raises(kind) as failed:
        Engine.at(url).image("x:y")
    assert type(failed.value) is kind and message in str(failed.value)


def test_a_question_is_not_waited_for_as_long_as_work(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "QUESTION_SECONDS", 0.5)
    began = time.monotonic()
    with pytest.raises(EngineError), engines.engine_errors():
        Engine.at(url).client.containers.get("silent")
    assert time.monotonic() - began < 4


def test_a_socket_that_may_not_be_opened_is_a_lack_of_rights(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    with pytest.raises(HostError) as failed:
        Engine.at(url)
    assert "usermod" in failed.value.next_step


def test_an_engine_that_went_away_is_told_by_a_build(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM scratch\n")
    with pytest.raises(EngineError):
        buildkit.build(tmp_path, "--tag", "x:y", host={"DOCKER_HOST": "unix:///nonexistent/docker.sock"})


def test_the_cli_is_one_that_can_use_buildkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, code in (("one", 1), ("two", 0)):
        script = root_with(
            tmp_path, {f"{folder}/docker": f'#!/bin/sh\n[ "$1$DOCKER_BUILDKIT" = build1 ] && exit {code}\n'}
        )
        (script / folder / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/one:{tmp_path}/two:/bin")
    assert buildkit.builder.__wrapped__() == str(tmp_path / "two/docker")
    monkeypatch.setenv("PATH", str(tmp_path / "one"))
    with pytest.raises(HostError):
        buildkit.builder.__wrapped__()
