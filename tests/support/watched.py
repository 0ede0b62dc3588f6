"""Servers in containers whose processes are killed, stopped and brought back."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from docker.models.containers import Container

from sparkpin.serve import switching
from sparkpin.serve.served import Served

SIGNAL = """
import os, signal
for name in filter(str.isdigit, os.listdir("/proc")):
    try:
        said = open(f"/proc/{{name}}/cmdline", "rb").read().replace(b"\\0", b" ")
        if int(name) not in (1, os.getpid()) and {words!r}.encode() in said:
            os.kill(int(name), signal.SIG{signal})
    except (FileNotFoundError, ProcessLookupError):
        pass  # it ended meanwhile, as a health check does
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def signal_processes(container: Container, words: str, name: str) -> None:
    """Those whose command line has the words; from within, as the container's own user; process 1 is left out."""
    done = container.exec_run(["python", "-IS", "-c", SIGNAL.format(words=words, signal=name)])
    assert done.exit_code in (0, 137), done.output  # 137: the container was quicker to end


def until(true: Callable[[], bool], seconds: float = 1800) -> None:
    """Wait; how long it may take is no part of what is tested."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.2)


def await_start(container: Container, count: int, served: Served) -> None:
    """Docker has started it so often again, finds it healthy, and it answers."""

    def is_back() -> bool:
        container.reload()
        health = container.attrs["State"]["Health"]["Status"]
        return container.attrs["RestartCount"] == count and health == "healthy" and not switching.fault_of(served, None)

    until(is_back)
