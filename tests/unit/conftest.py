"""Unit tests write small files by the ten thousand: in memory where the machine has a file system for that.

They know nothing of this machine: neither what sparkpin has left on it nor its Docker engine.
"""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import places
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


@functools.cache
def machine() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="sparkpin-unit-")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """For each unit test with its fixtures, of whatever scope, and for no test that follows it on the same worker."""
    if not item.path.is_relative_to(HERE):  # pytest asks every conftest.py of every test
        return (yield)
    folder = machine().name
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARKPIN_HOME", f"{folder}/home")
        patch.setenv("SPARKPIN_CACHE", f"{folder}/cache")
        patch.setenv("DOCKER_HOST", f"unix://{folder}/{places.NO_ENGINE}")
        return (yield)
