"""What ./install.sh leaves: the images and releases of the cpu stack."""

from __future__ import annotations

import subprocess

import pytest
from checkout import INVOKE, PROJECT

from sparkpin.core.paths import Paths
from sparkpin.releases.record import Releases


@pytest.fixture(scope="session")
def main_job() -> Releases:
    """The releases of the pins of this checkout."""
    subprocess.run([*INVOKE, "up"], cwd=PROJECT, check=True)
    return Releases(Paths.from_env(PROJECT))
