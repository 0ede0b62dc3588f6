"""Tiny wheels, and a package index over real HTTP that can be slow, for the tests of lock and fetch."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import tempfile
import time
import uuid
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

import local_server
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
    """slow: file -> seconds between pieces of 64 KiB; asked: file names served.

    gone: files that the pages name and that are not there any more. sizes: pages are JSON and tell them (PEP 700).
    busy: files that a 503 stands before, once; login: "name:password" that everything requires; stale: what is sent in
    place of a file.
    endless: files that never end, and tell no length; sent: bytes of these; moved: file -> where it is said to lie.
    uploaded: file -> when it came ("2026-05-10T07:38:37Z"), which JSON pages tell, too.
    """

    folder: Path
    url: str = ""
    slow: dict[str, float] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
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

    class Simple(local_server.Handler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            wanted = f"Basic {base64.b64encode(index.login.encode()).decode()}"
            kind, _, name = unquote(urlsplit(self.path).path).removeprefix(prefix).strip("/").partition("/")
            if index.login and self.headers.get("Authorization") != wanted:
                self.send(401)
            elif kind == "simple":
                self.send_page(name)
            elif kind != "files":
                self.send(404)
            elif self.command == "HEAD":
                self.begin(200, (folder / name).stat().st_size)
            else:
                index.asked.append(name)
                self.send_wheel(name)

        def send_page(self, name: str) -> None:
            files = [*folder.glob("*.whl"), *folder.glob("*.tar.gz"), *folder.glob("*.zip")]
            files = sorted(path for path in files if path.name.split("-")[0].replace("_", "-") == name)
            kind, body = "text/html", b""
            if index.sizes and files:
                kind, body = "application/vnd.pypi.simple.v1+json", page(prefix, name, files, index.uploaded)
            for path in files if not body else ():
                sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
                body += f'<a href="{prefix}/files/{path.name}#sha256={sha256}">{path.name}</a>\n'.encode()
            self.send(200 if files else 404, body, {"Content-Type": kind, "Cache-Control": "no-cache"})

        def send_wheel(self, name: str) -> None:
            if name in index.gone:
                self.send(404)
            elif name in index.busy:
                index.busy.discard(name)
                self.send(503)
            elif name in index.moved:
                self.send(302, headers={"Location": index.moved[name]})
            elif name in index.endless:
                self.send_response(200)
                self.send_header("Connection", "close")
                self.end_headers()
                while self.write(bytes(1 << 16)):
                    index.sent += 1 << 16
            else:
                data, span = index.stale.get(name) or (folder / name).read_bytes(), self.headers.get("Range", "")
                first = int(span.removeprefix("bytes=").partition("-")[0]) if span else 0
                more = {"Content-Range": f"bytes {first}-{len(data) - 1}/{len(data)}"} if first else {}
                self.begin(206 if first else 200, len(data) - first, {"Cache-Control": "no-cache", **more})
                for start in range(first, len(data), 1 << 16):
                    if not self.write(data[start : start + (1 << 16)]):
                        break
                    time.sleep(index.slow.get(name, 0))

    with local_server.serve(Simple) as url:
        index.url = f"{url}{prefix}/simple/"
        yield index


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
