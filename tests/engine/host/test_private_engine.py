"""Private engines, real ones: used, killed, started again, and what is left when they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from heard import heard
from private_engine import engine_folder, sleeper
from watched import until

from sparkpin.core.errors import HostError
from sparkpin.core.paths import Paths
from sparkpin.host import daemon
from sparkpin.host.daemon import ask, start_engine
from sparkpin.host.private_engine import private_engine

HOLD = """\
import sys, time
from pathlib import Path
from sparkpin.host.private_engine import private_engine
with private_engine(Path(sys.argv[1])):
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with engine_folder() as folder:
        yield folder


def processes(folder: Path) -> list[str]:
    """Of an engine, its containers' helpers included: all have its folder in their command lines."""
    return subprocess.run(["pgrep", "-f", f"{folder}/"], stdout=subprocess.PIPE, text=True).stdout.split()


def bridge() -> str:
    """The bridge of the machine's engine, with its number: one that was made anew has another."""
    return Path("/sys/class/net/docker0/ifindex").read_text()


def left_of(folder: Path) -> list[str]:
    mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if f" {folder}/" in line]
    return mounts + processes(folder)


def test_what_runs_in_it_ends_with_it_and_is_there_again(folder: Path) -> None:
    before = bridge()
    with private_engine(folder) as engine:
        assert bridge() == before, "the machine's engine keeps its bridge"
        engine.client.api.import_image_from_data(sleeper(), repository="sp-test/sleeper", tag="1")
        command = ["/bin/sleep", "600"]
        options = {"network_mode": "none", "detach": True, "restart_policy": {"Name": "unless-stopped"}}
        name = engine.client.containers.run("sp-test/sleeper:1", command, **options).name
        spaces = {Path(f"/proc/{one}/ns/net").readlink() for one in processes(folder)}
        assert spaces and Path("/proc/self/ns/net").readlink() not in spaces
    assert left_of(folder) == [] and ask(f"unix://{folder}/docker.sock") is None
    (folder / "docker.pid").write_text(str(os.getpid()))  # a number that is another's by now
    with private_engine(folder) as engine:
        container = engine.client.containers.get(name)
        while container.status != "running":
            container.reload()
        container.kill()
    assert left_of(folder) == []


def test_it_ends_with_a_program_that_is_killed(folder: Path) -> None:
    program = subprocess.Popen([sys.executable, "-c", HOLD, folder], stdout=subprocess.PIPE)
    assert program.stdout and program.stdout.readline() == b"ready\n" and ask(f"unix://{folder}/docker.sock")
    program.send_signal(signal.SIGKILL)
    program.wait()
    program.stdout.close()
    until(lambda: not left_of(folder), seconds=60)


def test_one_that_cannot_start_tells_its_last_lines(folder: Path) -> None:
    settings = {"storage-driver": "no-such-driver"}
    with pytest.raises(HostError, match=r"(?s)exit code 1.*no-such-driver"), private_engine(folder, settings=settings):
        pass
    assert left_of(folder) == []


def test_two_runs_at_once_start_one_engine_for_the_machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has one, so a private one stands for it, started by a command in dockerd's place."""
    lines, started = heard(), list[subprocess.Popen[bytes]]()
    spawn = daemon.spawn

    def hold(argv: list[str], log: Path) -> subprocess.Popen[bytes]:
        started.append(spawn([sys.executable, "-c", HOLD, str(folder)], log))
        return started[-1]

    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setattr(daemon, "OWN", f"unix://{folder}/docker.sock")
    monkeypatch.setattr(daemon, "spawn", hold)
    paths = Paths(folder, folder / "cache", folder / "home")
    try:
        with ThreadPoolExecutor(3) as pool:
            versions = {run.result() for run in [pool.submit(start_engine, paths) for _ in range(3)]}
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert len(versions) == len(started) == 1
    assert sum("another run is starting" in line for line in lines) == 2
