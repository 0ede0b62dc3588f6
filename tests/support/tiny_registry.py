"""One image in a registry on 127.0.0.1 that can only be read: enough for `docker pull` and for a base by digest."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DOCKER = "application/vnd.docker"
MANIFEST = f"{DOCKER}.distribution.manifest.v2+json"


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


@contextmanager
def registry(tar: Path, *, architecture: str = "amd64") -> Iterator[str]:
    """Serve an image of one layer as `repository` of the registry; yields its name@sha256:..."""
    layer = gzip.compress(tar.read_bytes(), mtime=0)
    config = json.dumps(
        {
            "architecture": architecture,
            "os": "linux",
            "config": {"Env": ["FROM_BASE=yes"], "Labels": {"made.by": "somebody else"}},
            "rootfs": {"type": "layers", "diff_ids": [digest_of(tar.read_bytes())]},
            "history": [{"created": "2020-01-01T00:00:00Z", "created_by": "somebody else"}],
            "created": "2020-01-01T00:00:00Z",
        }
    ).encode()

    def described(data: bytes, kind: str) -> dict[str, str | int]:
        return {"mediaType": f"{DOCKER}.{kind}", "size": len(data), "digest": digest_of(data)}

    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": described(config, "container.image.v1+json"),
            "layers": [described(layer, "image.rootfs.diff.tar.gzip")],
        }
    ).encode()
    blobs = {digest_of(data): data for data in (config, layer, manifest)}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = b"{}" if self.path == "/v2/" else blobs.get(self.path.rpartition("/")[2])
            self.send_response(200 if data is not None else 404)
            body = data or b""
            self.send_header("Content-Type", MANIFEST if body == manifest else "application/octet-stream")
            self.send_header("Docker-Content-Digest", digest_of(body))
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}/somebody/base@{digest_of(manifest)}"
    finally:
        server.shutdown()
        server.server_close()
