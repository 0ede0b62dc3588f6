"""Tiny wheels, and a package index over real HTTP that can be slow, for the tests of lock and fetch."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.server
import json
import os
import tempfile
import threading
import time
import uuid
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from urllib.parse import unquote, urlsplit

import pytest

from sparkpin.pins.schema import LockedFile


def make_wheel(
    folder: Path,
    name: str,
    version: str = "1.0",
    *,
    tag: str = "py3-none-any",
    requires: Sequence[str] = (),
    extras: str = "",
    size: int = 0,
    files: Mapping[str, str | bytes] | None = None,
) -> LockedFile:
    """A valid wheel with `size` bytes of payload or `files`, and its lock entry. extras: names with blanks between."""
    stem = f"{name.replace('-', '_')}-{version}"
    path = folder / f"{stem}-{tag}.whl"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    lines += [f"Provides-Extra: {extra}" for extra in extras.split()]
    info = f"{stem}.dist-info"
    content: dict[str, str | bytes] = dict(files or {f"{name.replace('-', '_')}.bin": bytes(size)})
    content[f"{info}/METADATA"] = "\n".join([*lines, *(f"Requires-Dist: {r}" for r in requires)]) + "\n"
    content[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n"
    rows = [f"{path},sha256={record_hash(data)},{len(data)}\n" for path, data in content.items()]
    content[f"{info}/RECORD"] = "".join([*rows, f"{info}/RECORD,,\n"])
    with zipfile.ZipFile(path, "w") as wheel:
        for member, text in content.items():
            wheel.writestr(zipfile.ZipInfo(member), text)
    data = path.read_bytes()
    return LockedFile(
        name=name, version=version, file=path.name, size=len(data), sha256=hashlib.sha256(data).hexdigest()
    )


def record_hash(data: str | bytes) -> str:
    digest = hashlib.sha256(data.encode() if isinstance(data, str) else data).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


CACHE = tempfile.TemporaryDirectory(prefix="sparkpin-uv-")  # uv looks at the interpreter once a session


@dataclass
class Index:
    """slow: file -> seconds between pieces of 64 KiB; hashes: whether pages carry them; asked: file names served.

    gone: files that the pages name and that are not there any more. sizes: pages are JSON and tell them (PEP 700).
    busy: files that a 503 stands before, once; login: "name:password" that everything requires; stale: what is sent in
    place of a file.
    ranges: those of the requests for files, "" for all of one.
    endless: files that never end, and tell no length; sent: bytes of these; moved: file -> where it is said to lie.
    uploaded: file -> when it came ("2026-05-10T07:38:37Z"), which JSON pages tell, too.
    """

    folder: Path
    url: str = ""
    hashes: bool = True
    slow: dict[str, float] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)
    gone: set[str] = field(default_factory=set)
    sizes: bool = True
    uploaded: dict[str, str] = field(default_factory=dict)
    busy: set[str] = field(default_factory=set)
    login: str = ""
    stale: dict[str, bytes] = field(default_factory=dict)
    endless: set[str] = field(default_factory=set)
    sent: int = 0
    moved: dict[str, str] = field(default_factory=dict)


@contextmanager
def serve(folder: Path) -> Iterator[Index]:
    """The wheels of a folder as a simple index (PEP 503) on a free port of 127.0.0.1, which is a proxy for itself."""
    index = Index(folder)
    prefix = f"/{uuid.uuid4().hex}"  # what uv keeps of an index is of no other one on that port

    class Handler(http.server.BaseHTTPRequestHandler):
        def is_refused(self) -> bool:
            wanted = f"Basic {base64.b64encode(index.login.encode()).decode()}"
            if index.login and self.headers.get("Authorization") != wanted:
                self.answer(401, "text/plain", b"")
                return True
            return False

        def do_HEAD(self) -> None:
            if self.is_refused():
                return
            self.answer(200, "application/octet-stream", (folder / unquote(self.path).rpartition("/")[2]).read_bytes())

        def do_GET(self) -> None:
            if self.is_refused():
                return
            kind, _, name = unquote(urlsplit(self.path).path).removeprefix(prefix).strip("/").partition("/")
            if kind == "simple":
                files = [*folder.glob("*.whl"), *folder.glob("*.tar.gz"), *folder.glob("*.zip")]
                files = sorted(p for p in files if p.name.split("-")[0].replace("_", "-") == name)
                if index.sizes and index.hashes and files:
                    self.answer(200, "application/vnd.pypi.simple.v1+json", page(prefix, name, files, index.uploaded))
                    return
                body = "".join(
                    f'<a href="{prefix}/files/{p.name}{self.fragment(p)}">{p.name}</a>\n' for p in files
                ).encode()
                self.answer(200 if files else 404, "text/html", body)
            else:
                index.asked.append(name)
                index.ranges.append(self.headers.get("Range", ""))
                if name in index.gone:
                    self.answer(404, "text/plain", b"")
                    return
                if name in index.busy:
                    index.busy.discard(name)
                    self.answer(503, "text/plain", b"")
                    return
                if name in index.moved:
                    self.answer(302, "text/plain", b"", more={"Location": index.moved[name]})
                    return
                if name in index.endless:
                    self.never_end()
                    return
                data, span = index.stale.get(name) or (folder / name).read_bytes(), self.headers.get("Range", "")
                begin = int(span.removeprefix("bytes=").partition("-")[0]) if span else 0
                more = {"Content-Range": f"bytes {begin}-{len(data) - 1}/{len(data)}"} if begin else {}
                pause = index.slow.get(name, 0)
                self.answer(206 if begin else 200, "application/octet-stream", data[begin:], pause, more)

        def never_end(self) -> None:
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                while True:
                    index.sent += self.wfile.write(bytes(1 << 16))

        def fragment(self, path: Path) -> str:
            return f"#sha256={hashlib.sha256(path.read_bytes()).hexdigest()}" if index.hashes else ""

        def answer(
            self, status: int, kind: str, body: bytes, pause: float = 0, more: Mapping[str, str] = MappingProxyType({})
        ) -> None:
            self.send_response(status)
            for header, value in {
                "Content-Type": kind,
                "Content-Length": str(len(body)),
                "Cache-Control": "no-cache",
                **more,
            }.items():
                self.send_header(header, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            try:
                for start in range(0, len(body), 1 << 16):
                    self.wfile.write(body[start : start + (1 << 16)])
                    time.sleep(pause)
            except OSError:
                pass  # the client was killed

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    index.url = f"http://127.0.0.1:{server.server_address[1]}{prefix}/simple/"
    try:
        yield index
    finally:
        server.shutdown()
        server.server_close()


def page(prefix: str, name: str, files: Sequence[Path], uploaded: Mapping[str, str]) -> bytes:
    """A project's page in the simple index's JSON form."""
    rows = [
        {
            "filename": file.name,
            "url": f"{prefix}/files/{file.name}",
            "hashes": {"sha256": hashlib.sha256(file.read_bytes()).hexdigest()},
            "size": file.stat().st_size,
            **({"upload-time": uploaded[file.name]} if file.name in uploaded else {}),
        }
        for file in files
    ]
    versions = sorted({file.name.removesuffix(".zip").removesuffix(".tar.gz").split("-")[1] for file in files})
    return json.dumps({"meta": {"api-version": "1.1"}, "name": name, "versions": versions, "files": rows}).encode()


def use_index(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Let uv and pip know this index and nothing else of the machine's configuration."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (("DEFAULT_INDEX", url), ("HTTP_RETRIES", "0"), ("CACHE_DIR", CACHE.name)):
        monkeypatch.setenv(f"UV_{name}", value)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name, value in (("CONFIG_FILE", os.devnull), ("INDEX_URL", url), ("RETRIES", "1")):
        monkeypatch.setenv(f"PIP_{name}", value)


def use_pip_config(monkeypatch: pytest.MonkeyPatch, file: Path, **words: object) -> None:
    """After `use_index`: what pip is configured for, and nothing else, decides. words: with _ in place of -."""
    for name in ("UV_DEFAULT_INDEX", *(name for name in os.environ if name.startswith("PIP_"))):
        monkeypatch.delenv(name)
    file.write_text("[global]\n" + "".join(f"{key.replace('_', '-')} = {value}\n" for key, value in words.items()))
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    monkeypatch.setenv("PIP_RETRIES", "1")
