"""An HTTP server of a test's own, on a free port of 127.0.0.1."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType

NONE: Mapping[str, str] = MappingProxyType({})


class Handler(BaseHTTPRequestHandler):
    """Silent, and at ease with clients that go away amid an answer: they may have been killed."""

    protocol_version = "HTTP/1.1"
    timeout = 60

    def handle(self) -> None:
        with suppress(ssl.SSLError):  # who does not trust the certificate
            super().handle()

    def send(self, status: int, body: bytes = b"", headers: Mapping[str, str] = NONE) -> None:
        self.begin(status, len(body), headers)
        self.write(body)

    def begin(self, status: int, length: int, headers: Mapping[str, str] = NONE) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(length), **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def write(self, data: bytes) -> bool:
        """Whether the client is still there."""
        try:
            self.wfile.write(data)
        except OSError:
            self.close_connection = True
        return not self.close_connection

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def serve(handler: type[Handler], cert: tuple[str, str] | None = None) -> Iterator[str]:
    """Gives its URL, without a slash at the end. cert: PEM files of a certificate and of its key, for TLS."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    if cert:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*cert)
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    server.daemon_threads, server.block_on_close = True, False
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http{'s' if cert else ''}://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
