"""The folder that a smoke test, or what runs in its place, leaves with a release."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sparkpin.files import PARTIAL, atomic_folder
from sparkpin.paths import Paths
from sparkpin.releases import Release, Releases


def evidence_folder(paths: Paths, release: Release) -> Path:
    return Releases(paths).evidence(release) / "smoke"


@contextlib.contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """A folder to fill, which then takes the place of the former one, whole."""
    former = None
    with atomic_folder(folder) as partial:
        yield partial
        if folder.exists():
            former = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=folder.parent))
            folder.rename(former / folder.name)
    if former:
        shutil.rmtree(former)
