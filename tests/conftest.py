"""Shared parts of the tests: the checkout, a small project to break, the real engine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import wheelhouse
from places import PROJECT, copied_to
from xdist.scheduler import LoadFileScheduling


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the project's data files, to edit and break; mods/ holds the sources."""
    return copied_to(tmp_path / "project")


@pytest.fixture(scope="module")
def shared_project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for all tests of a file, where an engine builds from it."""
    return copied_to(tmp_path_factory.mktemp("shared") / "project")


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Makes file systems of a size as mount(8) writes it ("1m"), to fill them up."""
    if os.geteuid() != 0:
        pytest.skip("mounts a small tmpfs: run as root")
    mounted: list[Path] = []

    def make(size: str) -> Path:
        folder = tmp_path / f"tmpfs-{size}"
        folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
        mounted.append(folder)
        return folder

    yield make
    for folder in mounted:
        subprocess.run(["umount", folder], check=True)


@pytest.fixture
def small_disk(tmpfs: Callable[[str], Path]) -> Path:
    """A file system of 1 MB."""
    return tmpfs("1m")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[wheelhouse.Index]:
    """A real package index on 127.0.0.1, which pip is told to use."""
    (tmp_path / "index").mkdir()
    with wheelhouse.serve(tmp_path / "index") as index:
        wheelhouse.use_index(monkeypatch, index.url)
        yield index


@pytest.fixture(scope="session")
def signing_key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real ssh key without a passphrase; its public part lies beside it."""
    path = tmp_path_factory.mktemp("key") / "signing_key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", path], check=True)
    return path


SLOW = ("engine", "e2e")  # folders whose tests have the marker of that name
LANES = ("tests/e2e/", "fake_engine")  # servers, and the one fake release of an engine: each is there once
ONLY_READ = ("test_mods_in_image.py", "test_loading_in_image.py", "test_lint.py", "test_rootfs_offline.py")
"""Need the built images, too, but serve nothing and change none: they may run beside a server."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The folder sets the marker: tests/engine/ and tests/e2e/."""
    for item in items:
        folder = (
            item.path.relative_to(PROJECT / "tests").parts[0] if item.path.is_relative_to(PROJECT / "tests") else ""
        )
        if folder in SLOW:
            item.add_marker(folder)


class Lanes(LoadFileScheduling):
    """Files that name the same thing of `LANES` run one after the other, on one worker.

    In place of the groups of `--dist loadgroup`: xdist 3.8 puts them into `_nodeid`, which pytest 9.2 no longer reads.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        if Path(file).name in ONLY_READ:
            return file
        text = file + (PROJECT / file).read_text()
        return next((lane for lane in LANES if lane in text), file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return Lanes(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if os.environ.get("CI") and terminalreporter.stats.get("skipped"):
        terminalreporter.write_line("error: no test may be skipped in CI", red=True)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A test that is skipped in CI tests nothing: the machine lacks what .ci/run should have installed."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") and reporter and reporter.stats.get("skipped") and session.exitstatus == 0:
        session.exitstatus = 1
