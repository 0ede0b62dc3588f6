"""A Debian mirror and a snapshot archive over real HTTP, which can be busy, slow to answer, or gone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import unquote

import local_server

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

    class Archive(local_server.Handler):
        def do_GET(self) -> None:
            with lock:
                active.add(id(self))
                archive.at_once = max(archive.at_once, len(active))
            path = unquote(self.path)
            archive.asked.append(path)
            if answers := archive.busy.get(path):
                status, pause = answers.pop(0)
                self.send(status, headers={"Retry-After": pause} if pause else {})
            elif path in archive.files:
                self.send(200, archive.files[path])
            else:
                self.send(404)
            with lock:
                active.discard(id(self))

    with local_server.serve(Archive) as archive.url:
        yield archive
