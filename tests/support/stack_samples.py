"""A made-up stack and locks of it, whose Debian half is in the store already: apt's mirror is no part of most tests."""

from __future__ import annotations

from pathlib import Path

from sparkpin.core.files import sha256_file
from sparkpin.core.paths import Paths
from sparkpin.fetch.store import Store
from sparkpin.pins.manifests import parse
from sparkpin.pins.schema import LockedFile, Stack, StackLock

DEBS = {"libc6": "2.36-9", "python3.11-minimal": "3.11.2-6"}


def stack(**python: object) -> Stack:
    value = {"version": "3.11", "requirements": ["a==1.0"], "layers": [{"name": "all", "packages": ["*"]}], **python}
    return parse(
        Stack,
        {
            "name": "s",
            "description": "",
            "platform": "linux/amd64",
            "default_recipe": "r",
            "debian": {"suite": "bookworm", "packages": []},
            "python": value,
        },
        "s.yaml",
    )


def locked(paths: Paths, *wheels: LockedFile) -> StackLock:
    debs = []
    for name, version in DEBS.items():
        path = paths.project.parent / f"{name}.deb"
        path.write_text(name)
        debs.append(entry(path, name, version))
        Store(paths.store).add(path, debs[-1])
    return StackLock(stack="s", inputs="0" * 64, debs=debs, wheels=list(wheels))


def entry(path: Path, name: str, version: str) -> LockedFile:
    sha256, size = sha256_file(path)
    return LockedFile(name=name, version=version, file=path.name, size=size, sha256=sha256)
