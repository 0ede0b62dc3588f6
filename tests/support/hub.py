"""A Hugging Face Hub on 127.0.0.1 for repositories in a folder: enough for huggingface_hub to list them and for ranges.

Spoken: ``/api/models/<repo>`` with ``/revision``, and ``/<repo>/resolve`` with byte ranges. As on the real Hub, large
files (``*.safetensors``) answer with a redirect, and have SHA-256. A repository has one revision, called ``main`` or by
its commit hash, which is derived from the content: the same files have the same hash everywhere.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import local_server
import pytest
from huggingface_hub import constants

from sparkpin.fetch.hub import Listed
from sparkpin.fetch.packed import commit_of, files_of

_API = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+?)(?:/revision/(?P<revision>[^/]+))?")
_RESOLVE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
_BLOB = re.compile(r"/blobs/(?P<repo>[^/]+/[^/]+)/(?P<path>[0-9a-f]{64})")
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")  # as `fetch` asks for them


class Request(NamedTuple):
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


class Repository(NamedTuple):
    name: str
    folder: Path
    commit: str
    files: list[Listed]


def scan(folder: Path, name: str) -> Repository:
    rows = [row._replace(size=claimed(folder / row.file, row.size)) for row in files_of(folder)]
    return Repository(name, folder, commit_of(folder), rows)


def claimed(file: Path, size: int) -> int:
    """The size of a safetensors file that has its header alone, by that header."""
    data = file.read_bytes()
    if file.suffix != ".safetensors" or len(data) < 8 or len(data) != 8 + int.from_bytes(data[:8], "little"):
        return size
    tensors = {name: one for name, one in json.loads(data[8:]).items() if name != "__metadata__"}
    return len(data) + max((one["data_offsets"][1] for one in tensors.values()), default=0)


def model_info(repository: Repository) -> dict[str, Any]:
    siblings = []
    for file, size, sha256 in repository.files:
        lfs = {"lfs": {"sha256": sha256, "size": size, "pointerSize": 127 + len(str(size))}} if sha256 else {}
        siblings.append({"rfilename": file, "size": size, **lfs})
    about = {"gated": "auto", "tags": ["license:other"]} if "gated" in repository.name else {"tags": ["license:mit"]}
    return {"id": repository.name, "sha": repository.commit, "siblings": siblings, **about}


@contextlib.contextmanager
def serve(
    root: Path,
    *,
    faults: Callable[[Request], Fault | None] | None = None,
    storage: str = "127.0.0.1",
    log: list[Request] | None = None,
    sent: list[int] | None = None,
) -> Iterator[str]:
    """Serve ``root/<owner>/<name>/`` while the context lasts; gives the endpoint's URL (for ``HF_ENDPOINT``).

    ``faults`` tells what goes wrong with a request; ``storage`` is the host's name in redirects to large files; ``log``
    receives every request, and ``sent`` the bytes of files' content that left.
    """
    names = [folder.relative_to(root).as_posix() for folder in root.glob("[!.]*/[!.]*")]
    repositories = {name: scan(root / name, name) for name in names}

    class Hub(local_server.Handler):
        def do_GET(self) -> None:
            names = ("Range", "Authorization", "Host", "Cache-Control")
            request = Request(self.command, self.path, *(self.headers.get(name, "") for name in names))
            if log is not None:
                log.append(request)
            fault, path = (faults and faults(request)) or Fault(), unquote(urlsplit(self.path).path)
            if path == "/api/agent-harnesses":  # huggingface_hub asks once a day
                return self.send(404)
            api, blob = _API.fullmatch(path), _BLOB.fullmatch(path)
            match = api or blob or _RESOLVE.fullmatch(path)
            assert match, path
            repository = repositories.get(match["repo"])
            if fault.status:
                self.send(fault.status, headers=fault.headers)
            elif not repository:
                self.refuse("RepoNotFound")
            elif not blob and match["revision"] not in (None, "main", repository.commit):
                self.refuse("RevisionNotFound")
            elif api:
                headers = {"Content-Type": "application/json"} | dict(fault.headers)
                self.send(200, json.dumps(model_info(repository)).encode(), headers)
            elif not (rows := [row for row in repository.files if match["path"] in (row.file, row.sha256)]):
                self.refuse("EntryNotFound")
            elif rows[0].sha256 and not blob:
                host = f"http://{storage}:{self.connection.getsockname()[1]}"
                self.send(302, headers={"Location": f"{host}/blobs/{repository.name}/{rows[0].sha256}"})
            else:
                self.send_part((repository.folder / rows[0].file).read_bytes(), rows[0].size, fault)

        def refuse(self, code: str) -> None:
            self.send(404, headers={"X-Error-Code": code, "X-Error-Message": code})

        def send_part(self, data: bytes, size: int, fault: Fault) -> None:
            status, headers = 200, dict(fault.headers)
            if (span := _RANGE.fullmatch(self.headers.get("Range", ""))) and not fault.whole:
                begin, end = int(span[1]), int(span[2]) + 1
                status, headers = 206, {"Content-Range": f"bytes {begin}-{end - 1}/{size}"} | headers
                data = data[begin:end]
            if fault.wrong:
                data = bytes([data[0] ^ 1]) + data[1:]
            self.begin(status, len(data), headers)
            cut = len(data) if fault.cut is None else fault.cut
            self.write(data[:cut])
            if fault.wait:
                fault.wait.wait(60)
                self.write(data[cut:])
            elif cut < len(data):
                self.close_connection = True
            if sent is not None:
                sent.append(len(data if fault.wait else data[:cut]))

    with local_server.serve(Hub) as url:
        yield url


def use(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Let huggingface_hub take this Hub for the public one, as HF_ENDPOINT does where it is set before the start."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
