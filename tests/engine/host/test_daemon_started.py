"""Starting an engine, with real ones: private engines that are used, killed, started again and stopped."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import docker
import pytest
from heard import heard
from private_engine import daemon_folder, sleeper

from sparkpin.core.errors import HostError
from sparkpin.core.paths import Paths
from sparkpin.host.daemon import Daemon, ask, mounts_below, owner_of, start_engine, stop_engine


@pytest.fixture
def folder() -> Iterator[Path]:
    with daemon_folder() as folder:
        yield folder


def paths_in(folder: Path) -> Paths:
    return Paths(folder, folder / "cache", folder / "home")


def pid_of(daemon: Daemon) -> int:
    pid = owner_of(daemon.pidfile, "dockerd")
    assert pid is not None
    return pid


def test_start_use_kill_start_again_stop(folder: Path) -> None:
    daemon, lines = Daemon.private(folder), heard()
    network = sorted(Path("/sys/class/net").iterdir())
    started = start_engine(paths_in(folder), daemon)
    assert any("starting the Docker engine" in line for line in lines)
    assert Path(f"/proc/{pid_of(daemon)}/ns/net").readlink() != Path("/proc/self/ns/net").readlink()
    assert sorted(Path("/sys/class/net").iterdir()) == network, "the machine's engine keeps its bridge"
    client = docker.DockerClient(base_url=f"unix://{daemon.socket}")
    assert client.version()["Version"] == started
    client.api.import_image_from_data(sleeper(), repository="sp-test/sleeper", tag="1")
    options = {
        "command": ["/bin/sleep", "600"],
        "network_mode": "none",
        "detach": True,
        "name": "sp-test",
        "stop_signal": "SIGKILL",
    }
    container = client.containers.run("sp-test/sleeper:1", **options)
    assert mounts_below(daemon.data_root), "a running container has its root file system mounted"

    first = pid_of(daemon)
    os.kill(first, signal.SIGKILL)
    until(lambda: owner_of(daemon.pidfile, "dockerd") is None)
    assert daemon.pidfile.exists() and daemon.socket.exists(), "a killed engine leaves these behind"
    stranger = subprocess.Popen(["sleep", "600"])
    try:
        daemon.pidfile.write_text(str(stranger.pid))
        daemon.pidfiles[1][0].write_text(str(stranger.pid))
        lines.clear()
        assert start_engine(paths_in(folder), daemon) == started
        assert sum("is gone" in line for line in lines) == 2
        assert pid_of(daemon) not in (first, stranger.pid)
        assert stranger.poll() is None, "the process whose number stood in the pid file must live"
    finally:
        stranger.kill()
        stranger.wait()
    container.reload()
    assert container.status == "exited"
    container.start()
    container.reload()
    assert container.status == "running"
    second = pid_of(daemon)
    assert start_engine(paths_in(folder), daemon) == started
    assert pid_of(daemon) == second, "an engine that answers is not started again"

    container.kill()
    client.close()
    stop_engine(daemon)
    assert ask(f"unix://{daemon.socket}") is None
    assert mounts_below(folder) == []
    assert not daemon.pidfile.exists()


def test_two_runs_at_once_start_one_engine(folder: Path) -> None:
    daemon, lines = Daemon.private(folder), heard()
    with ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(start_engine, paths_in(folder), daemon) for _ in range(3)]
        assert len({run.result() for run in runs}) == 1
    assert sum("starting the Docker engine (log" in line for line in lines) == 1


def test_stop_after_kill_leaves_no_mounts(folder: Path) -> None:
    daemon = Daemon.private(folder)
    start_engine(paths_in(folder), daemon)
    os.kill(pid_of(daemon), signal.SIGKILL)
    until(lambda: owner_of(daemon.pidfile, "dockerd") is None)
    stop_engine(daemon)
    assert mounts_below(folder) == []
    shutil.rmtree(daemon.data_root)


def test_an_engine_that_cannot_start_tells_its_last_lines(folder: Path) -> None:
    daemon = Daemon.private(folder)
    wrong = dataclasses.replace(daemon, settings={**daemon.settings, "storage-driver": "no-such-driver"})
    with pytest.raises(HostError, match=r"(?s)exit code 1.*no-such-driver") as caught:
        start_engine(paths_in(folder), wrong)
    assert caught.value.exit_code == 3


def until(condition: object, limit: float = 400) -> None:
    end = time.monotonic() + limit
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.05)
