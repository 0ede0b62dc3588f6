"""A registry of the tests' own on 127.0.0.1: Debian's docker-registry with TLS, and a password that config.json has."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from certificates import certificate
from watched import free_port

USER, WORD = "maker", "made-up-word"
CRYPTED = "$2y$05$abcdefghijklmnopqrstuumxx42w4WTSXBqR0A1e.D1tFajsBt2C."
"""Of WORD, by bcrypt, the only form that the registry takes."""


@dataclass
class LocalRegistry:
    folder: Path
    address: str
    port: int
    ca: str  # PEM file; "" for a registry with neither TLS nor password

    @property
    def url(self) -> str:
        return f"oci://{self.address}:{self.port}/spark/releases"

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def asked(self, method: str, what: str, status: str = "20.") -> int:
        """How many requests were answered so. what: a pattern for the path below the repository."""
        return len(re.findall(rf'"{method} /v2/spark/releases/{what}[^"]*" {status}', self.log))

    def login(self, home: Path, word: str = WORD) -> None:
        """As `docker login` leaves it in a folder that DOCKER_CONFIG names."""
        home.mkdir(exist_ok=True)
        auth = base64.b64encode(f"{USER}:{word}".encode()).decode()
        (home / "config.json").write_text(json.dumps({"auths": {f"127.0.0.1:{self.port}": {"auth": auth}}}))


@contextlib.contextmanager
def local_registry(folder: Path, *, closed: bool = True, address: str = "127.0.0.1") -> Iterator[LocalRegistry]:
    """closed: with TLS and a password."""
    program = shutil.which("docker-registry")
    if program is None or shutil.which("skopeo") is None:
        pytest.skip("needs docker-registry and skopeo (apt-get install docker-registry skopeo)")
    folder.mkdir()
    made = LocalRegistry(folder, address, free_port(), "")
    config: dict[str, object] = {
        "version": 0.1,
        "storage": {"filesystem": {"rootdirectory": str(folder / "store")}, "delete": {"enabled": True}},
    }
    http: dict[str, object] = {"addr": f"{address}:{made.port}"}
    if closed:
        made.ca, key = certificate(folder / "registry")
        http["tls"] = {"certificate": made.ca, "key": key}
        (folder / "users").write_text(f"{USER}:{CRYPTED}\n")
        config["auth"] = {"htpasswd": {"realm": "tests", "path": str(folder / "users")}}
    (folder / "config.yml").write_text(json.dumps({**config, "http": http}))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([program, "serve", folder / "config.yml"], stdout=log, stderr=subprocess.STDOUT)
    try:
        until = time.monotonic() + 30
        while "listening on" not in made.log:
            assert process.poll() is None and time.monotonic() < until, made.log
            time.sleep(0.02)
        yield made
    finally:
        process.terminate()
        process.wait()
