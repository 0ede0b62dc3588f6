"""Standard input and output of a program in a container: held from before it starts, with one line of JSON at a time;
or as a plain connection."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
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
        self.socket = raw(self.held)
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
            for stream, data in frames(self.socket):
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
            with contextlib.suppress(OSError):  # else `send` waits two minutes longer for a reader that is gone
                self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """The container's standard input ends, and with it what it runs."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError, docker.errors.DockerException):
            self.held.close()


def raw(held: Any) -> socket.socket:
    """Of what the SDK gives for a connection, which has to stay referenced."""
    found: socket.socket = getattr(held, "_sock", held)  # not so with TLS
    found.settimeout(None)
    return found


def frames(of: socket.socket) -> Iterator[tuple[int, bytes]]:
    """(stream, data), as Docker wraps what a program without a terminal writes. ValueError for what it would not."""
    while len(head := exactly(of, 8)) == 8:
        stream, count = struct.unpack(">BxxxL", head)
        if count > LONGEST:
            raise ValueError
        yield stream, exactly(of, count)


def exactly(of: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (piece := of.recv(count - len(data))):
        data += piece
    return data


def connected(container: Container, argv: Sequence[str]) -> socket.socket:
    """A connection to a program that is started in a container that runs: its input and output. Either end ends it."""
    with engine_errors():
        held: Any = container.exec_run(list(argv), stdin=True, stderr=False, socket=True).output
    ours, inner = socket.socketpair()
    there = raw(held)

    def pump_in() -> None:
        with contextlib.suppress(OSError):
            while data := inner.recv(1 << 16):
                there.sendall(data)
        with contextlib.suppress(OSError):
            there.shutdown(socket.SHUT_WR)  # the program ends then, and with it the other way

    def pump_out() -> None:
        with contextlib.suppress(OSError, ValueError):
            for _, data in frames(there):
                inner.sendall(data)
        for end in (inner, there):  # whichever the other way waits for
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        incoming.join()
        inner.close()
        with contextlib.suppress(OSError, docker.errors.DockerException):
            held.close()

    incoming = threading.Thread(target=pump_in, name="to a container", daemon=True)
    incoming.start()
    threading.Thread(target=pump_out, name="from a container", daemon=True).start()
    return ours
