"""Docker's containers for the packages above (only `host` imports the SDK), and connections to programs in them."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Sequence
from typing import Any

from docker.errors import APIError, DockerException, NotFound
from docker.models.containers import Container
from docker.types import DeviceRequest, Healthcheck, LogConfig, Mount, Ulimit
from docker.utils.socket import frames_iter

from sparkpin.host.engine import engine_errors

__all__ = ["APIError", "Container", "DeviceRequest", "Healthcheck", "LogConfig", "Mount", "NotFound", "Ulimit"]


def socket_of(response: Any) -> socket.socket:
    """Of what the SDK gives for a connection, which has to stay referenced."""
    found: socket.socket = getattr(response, "_sock", response)  # not so with TLS
    found.settimeout(None)
    return found


def connected(container: Container, argv: Sequence[str]) -> socket.socket:
    """A connection to a program that is started in a container that runs: its input and output. Either end ends it."""
    with engine_errors():
        response: Any = container.exec_run(list(argv), stdin=True, stderr=False, socket=True).output
    ours, inner = socket.socketpair()
    there = socket_of(response)

    def pump_in() -> None:
        with contextlib.suppress(OSError):
            while data := inner.recv(1 << 16):
                there.sendall(data)
        with contextlib.suppress(OSError):
            there.shutdown(socket.SHUT_WR)  # the program ends then, and with it the other way

    def pump_out() -> None:
        with contextlib.suppress(OSError, ValueError):
            for _, data in frames_iter(there, tty=False):  # type: ignore[no-untyped-call]
                inner.sendall(data)
        for end in (inner, there):  # whichever the other way waits for
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        incoming.join()
        inner.close()
        with contextlib.suppress(OSError, DockerException):
            response.close()

    incoming = threading.Thread(target=pump_in, name="to a container", daemon=True)
    incoming.start()
    threading.Thread(target=pump_out, name="from a container", daemon=True).start()
    return ours
