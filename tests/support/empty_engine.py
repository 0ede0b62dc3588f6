"""Fixtures: an engine of the tests' own, empty at the start of each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from private_engine import private_engine

from sparkpin.host.engine import Engine


@pytest.fixture(scope="session")
def own_engine() -> Iterator[Engine]:
    with private_engine() as engine:
        yield engine


@pytest.fixture
def empty_engine(own_engine: Engine) -> Iterator[Engine]:
    """An engine that nobody else uses; what a test leaves in it is removed."""
    yield own_engine
    for container in own_engine.client.containers.list(all=True):
        container.remove(force=True)
    for image in own_engine.client.images.list():
        own_engine.client.api.remove_image(image.id, force=True)
    for volume in own_engine.client.volumes.list():
        volume.remove(force=True)
