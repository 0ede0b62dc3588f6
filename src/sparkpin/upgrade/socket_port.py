"""A port on 127.0.0.1 for a server that this machine reaches otherwise: its container has no network, and some clients
ask by URL. No proxy stands before it: as long as it is open, every user of this machine may ask.
"""

from __future__ import annotations

import contextlib
import os
import socket
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path


def carry(source: socket.socket, target: socket.socket) -> None:
    """An HTTP client closes a connection as a whole: the end of one way ends both."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


class Port(socketserver.ThreadingTCPServer):
    daemon_threads, request_queue_size = True, 1024


@contextlib.contextmanager
def listening(path: Path) -> Iterator[int]:
    """The port. The folder is opened first: a socket's own path may have 107 bytes at most."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            links.append(self.request)
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as server:
                server.connect(f"/proc/self/fd/{folder}/{path.name}")
                there = threading.Thread(target=carry, args=(self.request, server))
                there.start()
                carry(server, self.request)
                there.join()

    links = list[socket.socket]()
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        with Port(("127.0.0.1", 0), Handler) as port:
            threading.Thread(target=port.serve_forever, daemon=True).start()
            try:
                yield int(port.server_address[1])
            finally:
                port.shutdown()
                for link in links:
                    with contextlib.suppress(OSError):  # which has ended
                        link.shutdown(socket.SHUT_RDWR)
    finally:
        os.close(folder)
