"""Fixtures of what ./install.sh leaves: the images and releases of the cpu stack."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from checkout import INVOKE, PROJECT

from sparkpin.core.paths import Paths
from sparkpin.host.engine import Engine
from sparkpin.releases.container import ready_timeout
from sparkpin.releases.record import Release, Releases
from sparkpin.smoke.client import Client
from sparkpin.smoke.run import subject_of
from sparkpin.smoke.server import Server, started
from sparkpin.smoke.subject import SmokeSubject


@pytest.fixture(scope="session")
def main_job() -> Releases:
    """The releases of the pins of this checkout."""
    subprocess.run([*INVOKE, "up"], cwd=PROJECT, check=True)
    return Releases(Paths.from_env(PROJECT))


@pytest.fixture(scope="session")
def stages(main_job: Releases) -> dict[str, Release]:
    """The newest release of each stage."""
    return {release.stage: release for release in main_job.of_recipe("scripted-tiny")}


@contextmanager
def ready(own: Paths, release: Release, model: Path, timeout: float = 1200) -> Iterator[tuple[Server, Client]]:
    """A server of the release that answers. own: with a home of the test's, so that its container is no leftover of
    ours; timeout: seconds of an answer."""
    with (
        started(own, Engine.connect(), release, model, gpus=False, timeout=ready_timeout(model), say=print) as server,
        Client.unix(server.socket, timeout=timeout) as client,
    ):
        server.wait_ready(client)
        yield server, client


@contextmanager
def asked(own: Paths, release: Release, model: Path, drafted: int) -> Iterator[SmokeSubject]:
    """What checks are asked of, of a `ready` server. drafted: tokens."""
    with ready(own, release, model) as (server, client):
        yield subject_of(release, client, server, drafted)
