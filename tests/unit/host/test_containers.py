"""A plain connection to a program in a container. Docker's CLI is a stand-in here: tests/engine has the real one."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparkpin.host.containers import connected


def dial(folder: Path, monkeypatch: pytest.MonkeyPatch, *argv: str) -> socket.socket:
    (folder / "docker").write_text('#!/bin/sh\necho "$1 $3 at $DOCKER_HOST"\nshift 3\nexec "$@"\n')
    (folder / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    container: Any = SimpleNamespace(id="abc", client=SimpleNamespace(host={"DOCKER_HOST": "unix:///x"}))
    ours = connected(container, argv)
    ours.settimeout(10)
    return ours


def read(ours: socket.socket) -> bytes:
    found = b""
    while piece := ours.recv(4096):
        found += piece
    return found


def test_both_ways_until_we_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with dial(tmp_path, monkeypatch, "cat") as ours:
        ours.sendall(b"asked\n")
        ours.shutdown(socket.SHUT_WR)
        assert read(ours) == b"exec abc at unix:///x\nasked\n"


def test_the_program_s_end_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with dial(tmp_path, monkeypatch, "true") as ours:
        assert read(ours).startswith(b"exec")
