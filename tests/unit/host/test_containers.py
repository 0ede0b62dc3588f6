"""A plain connection to a program in a container. The engine's end is a stand-in: tests/engine has the real one."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from sparkpin.host.containers import connected


@pytest.fixture
def ends() -> Any:
    """(ours, the program's as Docker wraps it)."""
    inner, outer = socket.socketpair()
    container: Any = SimpleNamespace(exec_run=lambda *_, **__: SimpleNamespace(output=inner))
    ours = connected(container, ["program"])
    ours.settimeout(10)
    outer.settimeout(10)
    yield ours, outer
    ours.close()
    outer.close()
    names = ("to a container", "from a container")
    for thread in threading.enumerate():
        if thread.name in names:
            thread.join(timeout=10)
            assert not thread.is_alive(), "a thread stays"


def test_both_ways(ends: Any) -> None:
    ours, program = ends
    ours.sendall(b"asked")
    assert program.recv(99) == b"asked"
    program.sendall(struct.pack(">BxxxL", 1, 3) + b"one" + struct.pack(">BxxxL", 1, 3) + b"two")
    assert ours.recv(3) + ours.recv(3) == b"onetwo"


def test_the_program_s_end_is_ours(ends: Any) -> None:
    ours, program = ends
    program.close()
    assert ours.recv(1) == b""


def test_a_client_that_leaves_ends_the_program(ends: Any) -> None:
    ours, program = ends
    ours.close()
    assert program.recv(1) == b""


def test_a_program_that_ends_while_it_is_sent_more_than_it_reads_leaves_no_thread(ends: Any) -> None:
    ours, program = ends
    ours.setblocking(False)
    with pytest.raises(BlockingIOError):
        while True:
            ours.send(b"x" * 65536)
    program.shutdown(socket.SHUT_WR)
    ours.settimeout(10)
    with contextlib.suppress(ConnectionResetError):  # what was sent and not read makes it one
        assert ours.recv(1) == b""
