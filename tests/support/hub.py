"""A Hugging Face Hub on 127.0.0.1 for repositories in a folder: enough for huggingface_hub to list them and for ranges.

Spoken: ``/api/models/<repo>`` with ``/revision``, and ``/<repo>/resolve`` with byte ranges. As on the real Hub, large
files (``*.safetensors``) answer with a redirect, and have SHA-256 where small ones have git's blob hash. A repository
has one revision, called ``main`` or by its commit hash, which is derived from the content: the same files have the same
hash everywhere.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import parse_qs, quote, unquote, urlsplit

import pytest
from hub_repository import Entry, Repository, model_info, scan
from huggingface_hub import constants

from sparkpin.core.files import CHUNK

MAIN = "main"
_API = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+?)(?:/revision/(?P<revision>[^/]+))?")
_RESOLVE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
_BLOB = re.compile(r"/blobs/(?P<repo>[^/]+/[^/]+)/(?P<etag>[0-9a-f]{64})")
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")  # as `fetch` asks for them


@dataclass(frozen=True, slots=True)
class Request:
    """One request as the server saw it; headers' values or '', ``token``: Authorization, ``cache``: Cache-Control."""

    method: str
    path: str
    range: str
    token: str = ""
    host: str = ""
    cache: str = ""


@dataclass(frozen=True, slots=True)
class Fault:
    """What a test wants to go wrong with one answer.

    status: answer with it and nothing else; headers: more of them; cut: break the connection after that many bytes of
    content; whole: leave the request's Range unheard; wrong: flip a bit in the first byte; wait: hold the content back,
    but for ``cut`` bytes of it, until that is set.
    """

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: int | None = None
    whole: bool = False
    wrong: bool = False
    wait: threading.Event | None = None


Faults = Callable[[Request], Fault | None]


@contextlib.contextmanager
def serve(
    root: Path,
    *,
    faults: Faults | None = None,
    storage: str = "127.0.0.1",
    log: list[Request] | None = None,
    sent: list[int] | None = None,
    clients: set[str] | None = None,
) -> Iterator[str]:
    """Serve ``root/<owner>/<name>/`` while the context lasts; gives the endpoint's URL (for ``HF_ENDPOINT``).

    For tests: ``faults`` tells what goes wrong with a request; ``storage`` is the host's name in redirects to large
    files; ``log`` receives every request, ``sent`` the bytes of files' content that left, chunk by chunk,
    ``clients`` the connections.
    """
    repositories = {
        (name := folder.relative_to(root).as_posix()): scan(folder, name)
        for folder in sorted(root.glob("[!.]*/[!.]*"))
        if folder.is_dir()
    }
    assert repositories, f"{root}: expected folders named <owner>/<name>"
    server = _Server(repositories, faults or (lambda request: None), storage, log if log is not None else [])
    server.sent = sent if sent is not None else []
    server.clients = clients if clients is not None else set()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server.url
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def use(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Let huggingface_hub take this Hub for the public one, as HF_ENDPOINT does where it is set before the start."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    sent: list[int]
    clients: set[str]

    def __init__(
        self, repositories: Mapping[str, Repository], faults: Faults, storage: str, log: list[Request]
    ) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.storage = f"http://{storage}:{self.server_port}"
        self.repositories = repositories
        self.log = log
        self.faults = faults

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away amid an answer is none of the server's business."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Problem(Exception):
    def __init__(self, status: HTTPStatus, code: str, message: str, commit: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.commit = status, code, message, commit


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 60
    server: _Server
    fault: Fault

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: a caller that wants the requests passes ``log``."""

    def do_GET(self) -> None:
        names = ("Range", "Authorization", "Host", "Cache-Control")
        request = Request(self.command, self.path, *(self.headers.get(name, "") for name in names))
        self.server.log.append(request)
        self.server.clients.add(str(self.client_address))
        self.fault = self.server.faults(request) or Fault()
        if self.fault.status:
            self._send(HTTPStatus(self.fault.status), self.fault.headers, b"")
            return
        try:
            path = unquote(urlsplit(self.path).path)
            if match := _BLOB.fullmatch(path):
                self._blob(match["repo"], match["etag"])
            elif match := _RESOLVE.fullmatch(path):
                self._resolve(match["repo"], match["revision"], match["path"])
            elif match := _API.fullmatch(path):
                self._api(match["repo"], match["revision"] or MAIN)
            else:
                raise _Problem(HTTPStatus.NOT_FOUND, "EntryNotFound", f"nothing at {path}")
        except _Problem as problem:
            headers = {"X-Error-Code": problem.code, "X-Error-Message": problem.message}
            if problem.commit:
                headers["X-Repo-Commit"] = problem.commit
            self._send_json({"error": problem.message}, problem.status, headers)

    def _api(self, name: str, revision: str) -> None:
        blobs = parse_qs(urlsplit(self.path).query).get("blobs", ["false"])[0].lower() in ("1", "true")
        self._send_json(model_info(self._repository(name, revision), blobs=blobs))

    def _resolve(self, name: str, revision: str, path: str) -> None:
        repository = self._repository(name, revision)
        entry = repository.entries.get(path)
        if entry is None:
            raise _Problem(HTTPStatus.NOT_FOUND, "EntryNotFound", f"Entry not found: {path}", repository.commit)
        headers = {"X-Repo-Commit": repository.commit, "ETag": f'"{entry.etag}"'}
        if entry.large:
            headers["Location"] = f"{self.server.storage}/blobs/{quote(name)}/{entry.etag}"
            self._send(HTTPStatus.FOUND, headers, b"")
        else:
            self._send_file(entry, headers)

    def _blob(self, name: str, etag: str) -> None:
        repository = self._repository(name, MAIN)
        for entry in repository.entries.values():
            if entry.etag == etag:
                self._send_file(entry, {})
                return
        raise _Problem(HTTPStatus.NOT_FOUND, "EntryNotFound", f"no blob {etag}")

    def _repository(self, name: str, revision: str) -> Repository:
        repository = self.server.repositories.get(name)
        if repository is None:
            raise _Problem(HTTPStatus.NOT_FOUND, "RepoNotFound", f"Repository not found: {name}")
        if revision not in (MAIN, f"refs/heads/{MAIN}", repository.commit):
            raise _Problem(HTTPStatus.NOT_FOUND, "RevisionNotFound", f"Invalid rev id: {revision}")
        return repository

    def _send_file(self, entry: Entry, headers: dict[str, str]) -> None:
        begin, end = 0, entry.size
        status = HTTPStatus.OK
        headers |= {"Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
        wanted = _RANGE.fullmatch(self.headers.get("Range", "").strip())
        if wanted and not self.fault.whole:
            begin, end = int(wanted[1]), int(wanted[2]) + 1
            status = HTTPStatus.PARTIAL_CONTENT
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{entry.size}"
        self._begin(status, {**headers, **self.fault.headers}, end - begin)
        cut = end if self.fault.cut is None else min(end, begin + self.fault.cut)
        with entry.file.open("rb") as file:
            file.seek(begin)
            if self.fault.wrong and begin < end:
                self.wfile.write(bytes([file.read(1)[0] ^ 1]))
                begin += 1
            self._copy(file, cut - begin)
            if self.fault.wait:
                self.fault.wait.wait(60)
                self._copy(file, end - cut)
            elif cut < end:
                self.close_connection = True

    def _copy(self, file: BinaryIO, size: int) -> None:
        while size > 0 and (chunk := file.read(min(size, CHUNK))):
            self.wfile.write(chunk)
            self.server.sent.append(len(chunk))
            size -= len(chunk)

    def _send_json(
        self, value: object, status: HTTPStatus = HTTPStatus.OK, headers: Mapping[str, str] | None = None
    ) -> None:
        self._send(status, {"Content-Type": "application/json", **(headers or {})}, json.dumps(value).encode())

    def _send(self, status: HTTPStatus, headers: Mapping[str, str], body: bytes) -> None:
        self._begin(status, headers, len(body))
        self.wfile.write(body)

    def _begin(self, status: HTTPStatus, headers: Mapping[str, str], length: int) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()
