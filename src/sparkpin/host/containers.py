"""Docker's containers for the packages above, since only `host` imports the SDK; and standard input and output of
programs in them."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from docker.errors import APIError, DockerException, NotFound
from docker.models.containers import Container
from docker.types import DeviceRequest, Healthcheck, LogConfig, Mount, Ulimit
from docker.utils.socket import STDERR, frames_iter

from sparkpin.core.errors import EngineError
from sparkpin.host.engine import engine_errors

__all__ = ["APIError", "Container", "DeviceRequest", "Healthcheck", "LogConfig", "Mount", "NotFound", "Ulimit"]

LAST = 4000  # bytes of standard error that an error shows at most
LONGEST = 16 << 20  # bytes of a line: the machine there may be anybody's


class Attached:
    """A program that answers in lines of JSON, connected from before it starts. `send` gives it data, `answer` gives
    its next line. Whoever sends looks at `answers` now and then: a program that has failed says so while it is sent
    more."""

    def __init__(self, container: Container) -> None:
        self.container, self.answers, self.errors = container, queue.Queue[dict[str, Any] | None](), b""
        with engine_errors():
            self.response = container.attach_socket(params={"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
        self.socket = socket_of(self.response)
        threading.Thread(target=self.read, name="attached", daemon=True).start()

    def send(self, data: bytes | memoryview) -> None:
        """What nobody reads any more is dropped: `answer` raises the reason."""
        with contextlib.suppress(OSError):
            self.socket.sendall(data)

    def answer(self) -> dict[str, Any]:
        if (line := self.answers.get()) is None:
            self.answers.put(None)
            lines = self.errors.decode(errors="replace").strip().splitlines()
            cause = lines[-1] if lines else "the connection to it ended"
            raise EngineError(f"the container {self.container.name} ended: {cause}", next_step="the same command again")
        return line

    def read(self) -> None:
        try:
            for line in self.lines():
                if not isinstance(answer := json.loads(line), dict):
                    raise ValueError
                self.answers.put(answer)
        except OSError:
            pass
        except (ValueError, RecursionError):
            self.errors = b"it answered something else than lines of JSON"
        finally:
            self.answers.put(None)
            self.shut()  # else `send` waits two minutes longer for a reader that is gone

    def lines(self) -> Iterator[bytes]:
        text = b""
        for stream, data in frames_iter(self.socket, tty=False):  # type: ignore[no-untyped-call]
            if stream == STDERR:
                self.errors = (self.errors + data)[-LAST:]
                continue
            *lines, text = (text + data).split(b"\n")
            if len(text) > LONGEST:
                raise ValueError
            yield from lines

    def shut(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """The container's standard input ends, and with it what it runs."""
        self.shut()
        with contextlib.suppress(OSError, DockerException):
            self.response.close()


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
