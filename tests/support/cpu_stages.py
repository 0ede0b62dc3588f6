"""Fixtures of what ./install.sh leaves: the images and releases of the cpu stack."""

from __future__ import annotations

import subprocess

import pytest
from checkout import INVOKE, PROJECT

from sparkpin.core.paths import Paths
from sparkpin.releases.record import Release, Releases


@pytest.fixture(scope="session")
def main_job() -> Releases:
    """The releases of the pins of this checkout."""
    subprocess.run([*INVOKE, "up"], cwd=PROJECT, check=True)
    return Releases(Paths.from_env(PROJECT))


@pytest.fixture(scope="session")
def stages(main_job: Releases) -> dict[str, Release]:
    """The newest release of each stage."""
    return {release.stage: release for release in main_job.of_recipe("scripted-tiny")}
