"""Ways to the engines of other machines. tests/engine/distribute/test_copy.py goes them, to a real ssh server."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkpin.core.errors import EngineError, HostError, InputError, NetworkError
from sparkpin.host.ssh import addresses_of, engine_at, ssh_command


def test_hosts_that_are_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://another:1")
    with pytest.raises(NetworkError, match="Could not resolve") as failed, engine_at("ssh://no-such-host.invalid"):
        pass
    assert "correct the name no-such-host.invalid" in failed.value.next_step
    with pytest.raises(NetworkError, match="refused") as failed, engine_at("ssh://127.0.0.1:9"):
        pass
    assert "port 9" in failed.value.next_step and "password" not in failed.value.next_step
    nowhere = "unix:///nowhere.sock"
    with pytest.raises(EngineError, match=f"{nowhere}: ") as unanswered, engine_at(nowhere):
        pass
    assert "another" not in str(unanswered.value), "that engine was not asked"
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HostError, match="no ssh"), engine_at("ssh://host"):
        pass


@pytest.mark.parametrize(
    "url",
    ["", "http://host", "ssh://", "ssh://host/path", "ssh://user:secret@Host:22", "ssh://host:port", "tcp://127.0.0.1"],
)
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(InputError) as failed, engine_at(url):
        pass
    assert "secret" not in str(failed.value)


def test_the_host_is_no_option_of_ssh() -> None:
    assert ssh_command("ssh://me@host:22")[-6:] == ["-l", "me", "-p", "22", "--", "host"]
    assert ssh_command("ssh://-oProxyCommand=x")[-2:] == ["--", "-oProxyCommand=x"]
    assert ssh_command("ssh://Me@MyAlias:22")[-6:] == ["-l", "Me", "-p", "22", "--", "MyAlias"]
    assert ssh_command("ssh://[::1]")[-1] == "::1"


def test_a_host_that_is_asked_for_its_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a program in the place of ssh: whatever the host says, and however long it says nothing."""
    (tmp_path / "ssh").write_text(f"#!/bin/sh\necho \"$@\" >{tmp_path}/words\nprintf '\\377 10.0.0.2 fe80::1\\n'\n")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert [str(one) for one in addresses_of("ssh://host")] == ["10.0.0.2"]
    assert "ConnectTimeout=" in (tmp_path / "words").read_text()
