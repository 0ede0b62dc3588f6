"""Docker's containers for the packages above (only `host` imports the SDK), and connections to programs in them."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Sequence
from typing import Any

from docker.errors import APIError, NotFound
from docker.models.containers import Container
from docker.types import DeviceRequest, Healthcheck, LogConfig, Mount, Ulimit

__all__ = ["APIError", "Container", "DeviceRequest", "Healthcheck", "LogConfig", "Mount", "NotFound", "Ulimit"]


def connected(container: Container, argv: Sequence[str]) -> socket.socket:
    """A connection to a program that is started in a container that runs: its input and output. Either end ends it.

    By Docker's CLI, which takes the streams apart; it ends with either end, too.
    """
    client: Any = container.client
    command = ["docker", "exec", "--interactive", str(container.id), *argv]
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            command,
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=subprocess.DEVNULL,
            env={**os.environ, **client.host},
            process_group=0,  # Ctrl-C is for us
        )
    threading.Thread(target=process.wait, name="to a container", daemon=True).start()
    return ours
