"""A container's standard input and output, held from before it starts: one line of JSON at a time, and data."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import docker.errors

from sparkpin.core.errors import EngineError
from sparkpin.host.containers import Container
from sparkpin.host.engine import engine_errors

LAST = 4000  # bytes of standard error that an error shows at most
ERRORS = 2  # Docker's number of standard error
LONGEST = 16 << 20  # bytes of a line, or of what Docker wraps at once: the machine there may be anybody's


class Attached:
    """`send` gives it data, `answer` gives its next line. Whoever sends looks at `answers` now and then: a program that
    has failed says so while it is sent more."""

    def __init__(self, container: Container) -> None:
        self.container, self.answers, self.errors = container, queue.Queue[dict[str, Any] | None](), b""
        with engine_errors():
            params = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
            self.held = container.attach_socket(params=params)
        self.socket: socket.socket = getattr(self.held, "_sock", self.held)  # type: ignore[arg-type] # not so with TLS
        self.socket.settimeout(None)
        threading.Thread(target=self.read, name="attached", daemon=True).start()

    def send(self, data: bytes | memoryview) -> None:
        """What nobody reads any more is let go: `answer` says why."""
        with contextlib.suppress(OSError):
            self.socket.sendall(data)

    def answer(self) -> dict[str, Any]:
        if (line := self.answers.get()) is None:
            self.answers.put(None)
            told = self.errors.decode(errors="replace").strip().splitlines()
            said = told[-1] if told else "the connection to it ended"
            raise EngineError(f"the container {self.container.name} ended: {said}", next_step="the same command again")
        return line

    def read(self) -> None:
        text = b""
        try:
            for stream, data in self.frames():
                if stream == ERRORS:
                    self.errors = (self.errors + data)[-LAST:]
                    continue
                *lines, text = (text + data).split(b"\n")
                if len(text) > LONGEST:
                    raise ValueError
                for line in lines:
                    if not isinstance(told := json.loads(line), dict):
                        raise ValueError
                    self.answers.put(told)
        except OSError:
            pass
        except (ValueError, RecursionError):
            self.errors = b"it answered something else than lines of JSON"
        finally:
            self.answers.put(None)

    def frames(self) -> Iterator[tuple[int, bytes]]:
        """(stream, data), as Docker wraps what a container without a terminal writes."""
        while len(head := self.exactly(8)) == 8:
            stream, count = struct.unpack(">BxxxL", head)
            if count > LONGEST:
                raise ValueError
            yield stream, self.exactly(count)

    def exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count and (piece := self.socket.recv(count - len(data))):
            data += piece
        return data

    def close(self) -> None:
        """The container's standard input ends, and with it what it runs."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError, docker.errors.DockerException):
            self.held.close()
