"""A Hub with one repository, from which pieces of files are fetched, and what goes wrong with its answers."""

from __future__ import annotations

import contextlib
import hashlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hub
import pytest
from hub import Fault, Request

from sparkpin.fetch import origins, transfer
from sparkpin.fetch.hub_client import HubOrigin
from sparkpin.fetch.origins import FileOrigin
from sparkpin.fetch.pieces import FilePiece

REPO = "acme/sample"
NOWHERE = "http://127.0.0.1:9"
BIG, SMALL = "model.safetensors", "config.json"  # redirected to storage; given by the Hub itself
MB = 1 << 20
DATA = {BIG: random.Random(1).randbytes(3 * MB), SMALL: b'{"a": 1}\n'}
FAULT = Callable[[Request], Fault | None]


class Remote:
    """A Hub with one repository, and a place to fetch to."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch | None = None) -> None:
        self.monkeypatch = monkeypatch
        if monkeypatch:
            hub.use(monkeypatch, NOWHERE)
        self.root, self.out = root / "remote", root / "out"
        self.requests: list[Request] = []
        self.said: list[str] = []
        for name, data in DATA.items():
            path = self.root / REPO / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        self.revision = hub.scan(self.root / REPO, REPO).commit

    @contextlib.contextmanager
    def serve(self, faults: FAULT | None = None, **options: Any) -> Iterator[str]:
        """For this process the public Hub, where there is a monkeypatch."""
        with hub.serve(self.root, faults=faults, log=self.requests, **options) as url:
            if self.monkeypatch:
                hub.use(self.monkeypatch, url)
            yield url

    @property
    def origin(self) -> HubOrigin:
        return HubOrigin(REPO, self.revision)

    def piece(self, origin: FileOrigin, begin: int = 0, end: int = -1, file: str = BIG, **more: Any) -> FilePiece:
        size = len(DATA[file])
        end = size if end < 0 else end
        name = f"{file}.{begin}-{end}"
        target = self.out / name
        part = self.out / "parts" / f"{name}.part"
        return FilePiece(origin, file, size, begin, end, name, part, lambda sha256: target, **more)

    def known_piece(self, origin: FileOrigin, begin: int, end: int) -> FilePiece:
        return self.piece(origin, begin, end, sha256=hashlib.sha256(DATA[BIG][begin:end]).hexdigest())

    def fetch(self, pieces: list[FilePiece]) -> transfer.Fetched:
        return transfer.fetch(pieces, self.said.append, title="fetching", advice="do something")

    def is_there(self, piece: FilePiece) -> bool:
        return piece.place("").read_bytes() == DATA[piece.file][piece.begin : piece.end]

    @property
    def blobs(self) -> list[str]:
        """The ranges that were asked of the storage."""
        return [r.range for r in self.requests if r.method == "GET" and r.path.startswith("/blobs/")]


def once(*faults: Fault, path: str = "/blobs/") -> FAULT:
    """The first answers of the storage go wrong, one after the other."""
    left, lock = list(faults), threading.Lock()

    def fault(request: Request) -> Fault | None:
        with lock:
            return left.pop(0) if left and request.method == "GET" and path in request.path else None

    return fault


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that a run would have waited to ask again; it does not, in a file that imports this."""
    seen: list[float] = []
    monkeypatch.setattr(transfer.TransferRun, "pause", lambda run, seconds: seen.append(seconds))
    monkeypatch.setattr(origins, "time", SimpleNamespace(sleep=seen.append, time=time.time))  # the server sleeps, too
    return seen
