"""An engine that each test finds empty, and the state folders of a machine that knows nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from carried_release import Source, engine_with_url

from sparkpin.core.paths import Paths
from sparkpin.host.engine import Engine


@pytest.fixture(scope="module")
def engine() -> Iterator[tuple[Engine, str]]:
    """With its url."""
    with engine_with_url() as found:
        yield found


@pytest.fixture
def empty(engine: tuple[Engine, str]) -> Iterator[Engine]:
    yield engine[0]
    for image in engine[0].client.images.list():
        engine[0].client.images.remove(image.id, force=True)


@pytest.fixture
def paths(source: Source, tmp_path: Path) -> Paths:
    return source.elsewhere(tmp_path)
