"""A Hub with one repository, from which pieces of files are fetched, and what goes wrong with its answers."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hub
import pytest
from heard import heard
from hub import Fault, Request

from sparkpin.fetch import transfer
from sparkpin.fetch.hub import HubRepository
from sparkpin.fetch.transfer import Piece

REPO = "acme/sample"
NOWHERE = "http://127.0.0.1:9"
BIG, SMALL = "model.safetensors", "config.json"  # redirected to storage; given by the Hub itself
MB = 1 << 20
DATA = {BIG: random.Random(1).randbytes(3 * MB), SMALL: b'{"a": 1}\n'}
FAULT = Callable[[Request], Fault | None]


class LocalHub:
    """A Hub with what is in `root`, which stands for the public one in this process while it is served."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.requests, self.said = folder / "remote", list[Request](), heard()
        self.point_at = functools.partial(hub.use, monkeypatch)
        self.point_at(NOWHERE)

    @contextlib.contextmanager
    def serve(self, faults: FAULT | None = None, **options: Any) -> Iterator[str]:
        with hub.serve(self.root, faults=faults, log=self.requests, **options) as url:
            self.point_at(url)
            yield url


class Remote(LocalHub):
    """A Hub with one repository, and a place to fetch to."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(folder, monkeypatch)
        self.out = folder / "out"
        for name, data in DATA.items():
            path = self.root / REPO / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        self.source = HubRepository(REPO, hub.scan(self.root / REPO, REPO).commit, "do something")

    def piece(self, begin: int = 0, end: int = -1, file: str = BIG, *, known: bool = True) -> Piece:
        """known: with its hash."""
        size = len(DATA[file])
        end = size if end < 0 else end
        target = self.out / f"{file}.{begin}-{end}"
        return Piece([self.source], file, size, begin, end, target, sha256(DATA[file][begin:end]) if known else "")

    def fetch(self, pieces: list[Piece]) -> None:
        transfer.fetch(pieces, title="fetching")

    def is_there(self, piece: Piece) -> bool:
        return piece.target.read_bytes() == DATA[piece.file][piece.begin : piece.end]

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
    seen, pause = list[float](), transfer.pause

    def skip(stop: threading.Event, seconds: float) -> None:
        seen.extend([seconds] if seconds else [])
        pause(stop, 0)

    monkeypatch.setattr(transfer, "pause", skip)
    return seen
