"""Fixtures of what ./install.sh leaves: the images and releases of the cpu stack, and one server of the last stage."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from checkout import INVOKE, PROJECT, Checkout
from docker.models.containers import Container
from watched import free_port

from sparkpin.build.make import checkpoint_of
from sparkpin.core.paths import Paths
from sparkpin.host.engine import Engine
from sparkpin.releases.record import Release, Releases
from sparkpin.serve import served as served_names
from sparkpin.serve import service
from sparkpin.serve.address import NONE, AddressOptions, key_path
from sparkpin.serve.proxy import before
from sparkpin.serve.served import Served
from sparkpin.smoke.client import Client
from sparkpin.smoke.run import subject_of
from sparkpin.smoke.server import Place, Server, own_server
from sparkpin.smoke.subject import SmokeSubject


@pytest.fixture(scope="session")
def main_job() -> Releases:
    """The releases of the pins of this checkout with their checkpoints. They need not have passed a smoke test."""
    subprocess.run([*INVOKE, "up", "--no-smoke"], cwd=PROJECT, check=True)
    records = Releases(Paths.from_env(PROJECT))
    for release in {release.stage: release for release in records.of_recipe("scripted-tiny")}.values():
        checkpoint_of(records.paths, release)
    return records


@pytest.fixture(scope="session")
def stages(main_job: Releases) -> dict[str, Release]:
    """The newest release of each stage."""
    return {release.stage: release for release in main_job.of_recipe("scripted-tiny")}


@pytest.fixture(scope="session")
def smoked(main_job: Releases) -> dict[str, Release]:
    """The same with their smoke tests: a server for each that has none yet."""
    subprocess.run([*INVOKE, "up"], cwd=PROJECT, check=True)
    return {release.stage: release for release in main_job.of_recipe("scripted-tiny")}


LOCAL = "127.0.0.1"


@dataclass(frozen=True)
class Service(Checkout):
    """This checkout with a home of its own, in which the last stage is served. Only the tests in the folders `served`
    may use it: one of pytest's workers has them all."""

    last: Release
    port: int

    @property
    def paths(self) -> Paths:
        return Paths(PROJECT, Paths.from_env(PROJECT).cache, self.home)

    @property
    def container(self) -> Container:
        return Engine.connect().client.containers.get(served_names.name_of(self.paths, self.last.recipe))

    @property
    def key(self) -> Path:
        return key_path(self.paths, self.last.recipe)

    def at(self, host: str = LOCAL, limit: str = NONE, allow: str = NONE) -> Served:
        """The server, at this address: its proxy is replaced where it has another. Each host has a port of its own, for
        the former proxy has its port until the new one answers."""
        options = AddressOptions(self.port if host == LOCAL else free_port(), host=host, limit=limit, allow=allow)
        checkpoint = checkpoint_of(self.paths, self.last)
        return service.start(self.paths, Engine.connect(), self.last, checkpoint, options=options)


@pytest.fixture(scope="session")
def server(
    main_job: Releases, stages: dict[str, Release], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    """It starts when a test is the first to ask for its address."""
    home = tmp_path_factory.mktemp("served")
    for name in ("releases", "images", "inputs", "checkpoints"):
        shutil.copytree(main_job.paths.home / name, home / name)
    made = Service(PROJECT, home, stages["v2-tq"], free_port())
    yield made
    service.stop(made.paths, Engine.connect(), None)


def ready(
    own: Paths, release: Release, model: Path, timeout: int = 1200
) -> AbstractContextManager[tuple[Server, Client]]:
    """A server of the release that answers. own: with a home of the test's, so that its container is no leftover of
    ours; timeout: seconds of an answer."""
    return own_server(own, release, [Place(Engine.connect(), model, None)], limit=timeout)


@contextmanager
def asked(own: Paths, release: Release, model: Path) -> Iterator[SmokeSubject]:
    """What checks are asked of, of a `ready` server."""
    with before(own, ready(own, release, model)) as (server, client):
        yield subject_of(release, client, server)
