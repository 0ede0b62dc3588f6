"""A Debian mirror and a snapshot archive over real HTTP, which can be busy, slow to answer, or gone."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import unquote

from sparkpin.pins.schema import LockedDeb

TIME, DAY_AFTER = "20261121T083914Z", "20261122T083914Z"


@dataclass
class DebianArchive:
    """files: path on the server -> its bytes; busy: path -> (status, Retry-After), once each; asked: paths in order;
    at_once: the most requests that were open at one time.
    """

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    busy: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    at_once: int = 0

    def mirror(self, deb: LockedDeb, data: bytes) -> None:
        self.files[f"/mirror/{deb.archive}/{deb.path}"] = data

    def snapshot(self, deb: LockedDeb, data: bytes, time: str = TIME) -> None:
        self.files[f"/archive/{deb.archive}/{time}/{deb.path}"] = data

    @property
    def mirrors(self) -> list[tuple[str, str]]:
        rows = (("debian", "s"), ("debian", "s-updates"), ("debian-security", "s-security"))
        return [(f"{self.url}/mirror/{archive}/", release) for archive, release in rows]


@contextmanager
def serve() -> Iterator[DebianArchive]:
    archive, lock, active = DebianArchive(), threading.Lock(), set[int]()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            with lock:
                active.add(id(self))
                archive.at_once = max(archive.at_once, len(active))
            path = unquote(self.path)
            archive.asked.append(path)
            headers, data, status = {}, archive.files.get(path), 200
            if answers := archive.busy.get(path):
                status, pause = answers.pop(0)
                headers, data = ({"Retry-After": pause} if pause else {}), b""
            self.send_response(404 if data is None else status)
            for key, value in {**headers, "Content-Length": str(len(data or b""))}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(data or b"")
            with lock:
                active.discard(id(self))

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        archive.url = f"http://127.0.0.1:{server.server_address[1]}"
        yield archive
        server.shutdown()
