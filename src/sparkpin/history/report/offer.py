"""The page on 127.0.0.1, for as long as the command runs."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from sparkpin.core.errors import BusyError, InputError

HOST = "127.0.0.1"
HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
}


def server(page: bytes, port: int = 0) -> ThreadingHTTPServer:
    """Answers GET / with the page, once `serve_forever` runs. port: 0 takes any that is free. BusyError."""

    class PageHandler(BaseHTTPRequestHandler):
        server_version, sys_version = "sparkpin", ""

        def do_GET(self) -> None:
            """A browser that was led here under another name gets nothing: a page of anybody could do that."""
            names = {f"{name}:{made.server_port}" for name in (HOST, "localhost")}
            found = self.path == "/" and self.headers.get("Host") in names
            self.send_response(200 if found else 404)
            for name, value in HEADERS.items():
                self.send_header(name, value)
            body = page if found else b"not here\n"
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """The command's output is its address."""

    if port > 65535:
        raise InputError(f"--port: saw {port}, wanted 0 to 65535", next_step="invoke report --open")
    try:
        made = ThreadingHTTPServer((HOST, port), PageHandler)
    except OSError as error:
        raise BusyError(
            f"cannot listen on {HOST}:{port}: {error.strerror}", next_step="invoke report --open (any free port)"
        ) from None
    return made
