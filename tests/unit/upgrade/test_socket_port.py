"""A port for what asks by URL a server that listens on a socket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fake_vllm
import httpx
import pytest

from sparkpin.upgrade import socket_port


@pytest.fixture
def socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A server of recorded answers on a Unix socket whose path is too long for one."""
    folder = tmp_path / ("long" * 20) / ("longer" * 10)
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    with fake_vllm.serving(fake_vllm.UnixServer("vllm.sock", fake_vllm.Handler)):
        yield folder / "vllm.sock"


def test_a_port_reaches_a_server_on_a_socket(socket: Path) -> None:
    left_open = httpx.Client(trust_env=False, timeout=60)
    with (
        socket_port.listening(socket) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as http,
    ):
        for _ in range(3):
            answer = http.get("/v1/models")
            assert answer.status_code == 200 and answer.json()["data"][0]["id"] == "scripted-tiny"
        assert left_open.get(f"http://127.0.0.1:{port}/health").status_code == 200
    with pytest.raises(httpx.ConnectError):
        left_open.get(f"http://127.0.0.1:{port}/v1/models")
    left_open.close()
