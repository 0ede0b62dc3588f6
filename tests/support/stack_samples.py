"""A made-up stack and locks of it, whose Debian half is in the store already: apt's mirror is no part of most tests."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import yaml

from sparkpin.core.files import sha256_file
from sparkpin.core.paths import Paths
from sparkpin.fetch import stack as lock_module
from sparkpin.fetch.store import Store
from sparkpin.pins.reading import parse
from sparkpin.pins.schema import LockedDeb, LockedFile, Stack, StackLock

DEBS = {"libc6": "2.36-9", "python3.11-minimal": "3.11.2-6"}


def pin(requirements: list[str], platform: str = "linux/amd64", **python: object) -> dict[str, object]:
    layers = [{"name": "all", "packages": ["*"]}]
    return {
        "description": "",
        "platform": platform,
        "default_recipe": "r",
        "debian": {"suite": "bookworm", "packages": ["python3"]},
        "python": {"version": "3.11", "requirements": requirements, "layers": layers, **python},
    }


def stack(**python: object) -> Stack:
    return parse(Stack, {"name": "s", **pin(["a==1.0"], **python)}, "s.yaml")


def locked(paths: Paths, *wheels: LockedFile) -> StackLock:
    debs = []
    for name, version in DEBS.items():
        path = paths.project.parent / f"{name}.deb"
        path.write_text(name)
        sha256, size = sha256_file(path)
        debs.append(LockedDeb(name=name, version=version, file=path.name, size=size, sha256=sha256))
        Store(paths.store).add(path, debs[-1])
    return StackLock(stack="s", inputs="0" * 64, debs=debs, wheels=list(wheels))


def deb(name: str, version: str) -> LockedDeb:
    data = f"{name} {version} amd64".encode()
    file = f"{name}_{version}_amd64.deb"
    return LockedDeb(name=name, version=version, file=file, size=len(data), sha256=hashlib.sha256(data).hexdigest())


def closure(*_: object) -> list[LockedDeb]:
    """The Debian half of a lock; the real one needs a mirror."""
    rows = (("libc6", "2.36-9+deb12u10"), ("python3.11-minimal", "3.11.2-6+deb12u5"))
    return [LockedDeb(name=n, version=v, file=f"{n}_{v}_amd64.deb", size=1, sha256="0" * 64) for n, v in rows]


def project(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Paths:
    """An empty project whose Debian half of a lock is made up."""
    monkeypatch.setattr(lock_module, "debian_closure", closure)
    (folder / "project/pins/stacks").mkdir(parents=True)
    return Paths(folder / "project", folder / "cache", folder / "home")


def write(paths: Paths, requirements: list[str], platform: str = "linux/amd64", **python: object) -> None:
    (paths.project / "pins/stacks/s.yaml").write_text(yaml.safe_dump(pin(requirements, platform, **python)))


def versions(lock: StackLock) -> dict[str, str]:
    return {wheel.name: wheel.version for wheel in lock.wheels}
