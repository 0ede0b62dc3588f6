"""Ways to the engines of other machines. tests/engine/distribute/test_copy.py goes them, to a real ssh server."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkpin.core.errors import EngineError, HostError, InputError, NetworkError
from sparkpin.host import machine
from sparkpin.host.ssh import engine_at


def test_hosts_that_are_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://another:1")
    with pytest.raises(NetworkError, match="Could not resolve") as failed, engine_at("ssh://no-such-host.invalid"):
        pass
    assert "no-such-host.invalid" in failed.value.next_step
    with pytest.raises(NetworkError, match="refused"), engine_at("ssh://127.0.0.1:9"):
        pass
    nowhere = "unix:///nowhere.sock"
    with pytest.raises(EngineError, match=f"{nowhere}: ") as unanswered, engine_at(nowhere):
        pass
    assert "another" not in str(unanswered.value), "that engine was not asked"
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(machine, "SYSTEM_PATH", str(tmp_path))
    with pytest.raises(HostError, match="no ssh"), engine_at("ssh://host"):
        pass


@pytest.mark.parametrize(
    "url",
    [
        *("", "http://host", "ssh://", "ssh://host?x", "ssh://user:secret@Host:22", "ssh://host:port"),
        *("tcp://127.0.0.1", "ssh://-oProxyCommand=x"),
    ],
)
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(InputError) as failed, engine_at(url):
        pass
    assert "secret" not in str(failed.value)


def test_ssh_is_given_host_and_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ssh").write_text(f'#!/bin/sh\nfor word; do echo "$word"; done >{tmp_path}/words\n')
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for host, path in (("ssh://Me@MyAlias:22", "/run/user/1/docker.sock"), ("ssh://host", "")):
        with pytest.raises(NetworkError), engine_at(host + path):
            pass
        forward, *login = (tmp_path / "words").read_text().splitlines()[-4:-1]
        assert forward.endswith(f"/docker.sock:{path or '/var/run/docker.sock'}") and login == ["--", host]


def test_a_host_that_says_nothing_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ssh").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(NetworkError), engine_at("ssh://host", seconds=0):
        pass
