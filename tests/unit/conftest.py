"""Unit tests write small files by the ten thousand: in memory where the machine has a file system for that.

They know nothing of this machine: neither what sparkpin has left on it nor its Docker engine.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
MEMORY, LEAST = Path("/dev/shm"), 2 << 30  # bytes free
ROOT = "PYTEST_DEBUG_TEMPROOT"  # pytest's own variable: below it is all that `tmp_path` gives


def pytest_configure(config: pytest.Config) -> None:
    """Only in a run of unit tests alone: Docker's engine and its builds stay on the disk."""
    mine = all(Path(str(argument).partition("::")[0]).resolve().is_relative_to(HERE) for argument in config.args)
    if mine and is_for_programs(MEMORY) and shutil.disk_usage(MEMORY).free >= LEAST:
        os.environ.setdefault(ROOT, str(MEMORY))


def is_for_programs(folder: Path) -> bool:
    """Tests run what they write; in a container this file system often forbids that."""
    return folder.is_dir() and not os.statvfs(folder).f_flag & os.ST_NOEXEC


@pytest.fixture(scope="session", autouse=True)
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("machine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARKPIN_HOME", str(folder / "home"))
        patch.setenv("SPARKPIN_CACHE", str(folder / "cache"))
        patch.setenv("DOCKER_HOST", f"unix://{folder}/no-engine")
        yield
