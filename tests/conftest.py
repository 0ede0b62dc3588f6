"""Shared parts of the tests: the checkout, a small project to break, the real engine."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import durations
import pytest
import trials
import wheelhouse
from cpu_stages import main_job, server, smoked, stages
from places import NO_ENGINE, PROJECT, copied_to, written_through
from xdist.scheduler import LoadFileScheduling

from sparkpin.core.terminal import LOG

__all__ = ["main_job", "server", "smoked", "stages"]  # fixtures


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None]:
    """Tables as one gets them who searches them; not around pytest's own lines. test_terminal.py has narrow ones.

    This variable alone is put back: what fixtures set is theirs to undo, and they do it within the teardown.
    """
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "1000"
    try:
        return (yield)
    finally:
        os.environ.pop("COLUMNS", None)
        if before is not None:
            os.environ["COLUMNS"] = before


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None]:
    yield from pytest_runtest_call()
    assert not written_through(), "a test wrote into a file that other copies of the project have, too: places.rewrite"


@pytest.fixture(autouse=True)
def _heard() -> Iterator[None]:
    """Ends what heard.py began."""
    before = list(LOG.handlers)
    yield
    LOG.handlers[:] = before
    LOG.setLevel(logging.INFO)  # of a task's --quiet


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


PATH = os.environ.get("PATH")
# Tests run commands by the hundred: each process would compile all that it imports, for half of its time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
SHARED = ("tests/e2e/served/", "tests/adversary/served/")
"""Folders whose tests ask the server of the session: `server` of support/cpu_stages.py."""
FIRST = ("test_golden.py", "served")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # pytest-xdist's workers send their reports to the process that has this
        config.pluginmanager.register(durations.Durations())
        config.pluginmanager.register(trials.Trials())


class Scheduler(LoadFileScheduling):
    """A worker gets whole files, and one worker gets all that ask the server of the session."""

    def _split_scope(self, nodeid: str) -> str:
        return "served" if nodeid.startswith(SHARED) else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduler:
    return Scheduler(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long comes first, so that workers end at the same time: FIRST, then the largest files."""
    sizes = {path: path.stat().st_size for path in {item.path for item in items}}

    def order(item: pytest.Item) -> tuple[bool, int]:
        return not {item.path.name, item.path.parent.name}.intersection(FIRST), -sizes[item.path]

    items.sort(key=order)


def is_unit(item: pytest.Item) -> bool:
    """Also a mod's own test."""
    tests = PROJECT / "tests"
    return not item.path.is_relative_to(tests) or item.path.is_relative_to(tests / "unit")


def pytest_runtest_setup(item: pytest.Item) -> None:
    assert os.environ.get("PATH") == PATH, "an earlier test left another PATH behind"
    if not is_unit(item):
        assert not os.environ.get("DOCKER_HOST", "").endswith(NO_ENGINE), "what unit tests are given was left behind"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if os.environ.get("CI") and terminalreporter.stats.get("skipped"):
        terminalreporter.write_line("error: no test may be skipped in CI", red=True)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A test that is skipped in CI tests nothing: the machine lacks what .ci/run should have installed."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") and reporter and reporter.stats.get("skipped") and session.exitstatus == 0:
        session.exitstatus = 1
