"""Which engine is meant, and when one is started. tests/engine/host starts real ones."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import socketserver
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sparkpin.core.errors import HostError
from sparkpin.core.paths import Paths
from sparkpin.host import daemon
from sparkpin.host.daemon import start_engine
from sparkpin.host.engine import Engine, engine_of

ROOTLESS = ["name=seccomp,profile=default", "name=rootless"]


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    """Nothing may be started."""

    def start(*_: object, **__: object) -> None:
        raise AssertionError("an engine must not be started")

    monkeypatch.setattr(daemon.subprocess, "Popen", start)
    return Paths(tmp_path, tmp_path / "cache", tmp_path / "home")


@contextlib.contextmanager
def engine_with(options: list[str], socket: Path) -> Iterator[None]:
    """An engine at a socket, which answers with its version and its security options."""

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"ApiVersion": "1.41", "Version": "20.10", "SecurityOptions": options}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def address_string(self) -> str:
            return "a socket has none"

        def log_message(self, *_: object) -> None:
            pass

    with socketserver.ThreadingUnixStreamServer(str(socket), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield
        server.shutdown()


def by_variable(url: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", url)


def by_context(url: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Docker's CLI, as `docker context use` leaves it."""
    monkeypatch.delenv("DOCKER_HOST")
    monkeypatch.setenv("DOCKER_CONFIG", str(folder))
    meta = folder / f"contexts/meta/{hashlib.sha256(b'away').hexdigest()}/meta.json"
    meta.parent.mkdir(parents=True)
    meta.write_text(json.dumps({"Name": "away", "Metadata": {}, "Endpoints": {"docker": {"Host": url}}}))
    (folder / "config.json").write_text('{"currentContext": "away"}')


@pytest.mark.parametrize("name_it", [by_variable, by_context])
@pytest.mark.parametrize("kind", ["dead", "rootless", "ssh"])
def test_a_named_engine_that_cannot_be_used_is_one_clear_error(
    kind: str,
    name_it: Callable[[str, Path, pytest.MonkeyPatch], None],
    paths: Paths,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever asks for it, and with the way back to this machine's own."""
    socket = tmp_path / "docker.sock"
    url = "ssh://root@elsewhere" if kind == "ssh" else f"unix://{socket}"
    name_it(url, tmp_path / "config", monkeypatch)
    with engine_with(ROOTLESS, socket) if kind == "rootless" else contextlib.nullcontext():
        assert daemon.named_engine() == url
        with pytest.raises(HostError, match=url) as caught:
            engine_of(paths)
    assert daemon.USE_OWN in caught.value.next_step


def test_an_engine_that_runs_as_root_is_taken_wherever_its_socket_lies(tmp_path: Path) -> None:
    with engine_with(ROOTLESS[:1], tmp_path / "docker.sock"):
        assert Engine.at(f"unix://{tmp_path}/docker.sock").info["Version"] == "20.10"


def test_only_root_starts_an_engine(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setattr(daemon, "OWN", f"unix://{paths.project}/none.sock")
    monkeypatch.setattr(daemon.os, "geteuid", lambda: 1000)
    with pytest.raises(HostError) as caught:
        start_engine(paths)
    assert caught.value.next_step == daemon.start_command() and caught.value.next_step.startswith("sudo ")
    assert list(paths.project.iterdir()) == []
