"""Starting an engine, with real ones: private engines that are used, killed, started again and stopped."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from private_engine import daemon_folder, quiet

from sparkpin.core.errors import HostError
from sparkpin.core.paths import Paths
from sparkpin.host import daemon as daemons
from sparkpin.host.daemon import Daemon, mounts_below, owner_of, start_engine, stop_engine


@pytest.fixture
def folder() -> Iterator[Path]:
    with daemon_folder() as folder:
        yield folder


def paths_in(folder: Path) -> Paths:
    return Paths(folder, folder / "cache", folder / "home")


def test_a_named_engine_that_does_not_answer_is_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")

    def started(*_: object, **__: object) -> None:
        raise AssertionError("another engine must not be started")

    monkeypatch.setattr(daemons.subprocess, "Popen", started)
    monkeypatch.setattr(daemons.subprocess, "run", started)
    with pytest.raises(HostError, match=r"none\.sock") as caught:
        start_engine(paths_in(tmp_path), quiet)
    assert "unset DOCKER_HOST" in caught.value.next_step


def test_only_root_starts_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemons.os, "geteuid", lambda: 1000)
    with pytest.raises(HostError, match="only root") as caught:
        start_engine(paths_in(tmp_path), quiet, Daemon.private(tmp_path))
    assert caught.value.next_step.startswith("sudo ")
    assert list(tmp_path.iterdir()) == []


def test_the_systems_engine_is_never_stopped(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        stop_engine(Daemon.system(paths_in(tmp_path)), quiet)


def test_settings_of_the_systems_engine(tmp_path: Path) -> None:
    config = tmp_path / "daemon.json"
    config.write_text('{"data-root": "/big/docker", "pidfile": "/run/d.pid"}')
    daemon = Daemon.system(paths_in(tmp_path), config)
    assert (daemon.data_root, daemon.pidfile) == (Path("/big/docker"), Path("/run/d.pid"))
    assert daemon.exec_root == Path("/var/run/docker")
    config.write_text("{ not json")
    assert Daemon.system(paths_in(tmp_path), config).data_root == Path("/var/lib/docker")


@pytest.mark.parametrize(
    ("stat", "wanted"),
    [
        ("77 (dockerd) S 1 77", 77),
        ("77 (dockerd) Z 1 77", None),
        ("77 (sleep) S 1 77", None),
        ("77 (a (dockerd) S) S 1 77", None),
        (None, None),
    ],
)
def test_owner_of_a_pid_file(tmp_path: Path, stat: str | None, wanted: int | None) -> None:
    (tmp_path / "pid").write_text("77\n")
    if stat:
        (tmp_path / "77").mkdir()
        (tmp_path / "77/stat").write_text(stat)
    assert owner_of(tmp_path / "pid", "dockerd", proc=tmp_path) == wanted


def test_a_mount_that_is_in_use_for_a_moment_is_waited_for(
    tmpfs: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = tmpfs("1m") / "inner"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", mount], check=True)
    with (mount / "used").open("w"):
        monkeypatch.setattr(daemons, "STOP_TIMEOUT", 0.3)
        with pytest.raises(HostError):
            daemons.unmount(mount)
    monkeypatch.setattr(daemons, "STOP_TIMEOUT", 30.0)
    user = subprocess.Popen(["sleep", "0.5"], cwd=mount)
    daemons.unmount(mount)
    assert user.wait() == 0 and mounts_below(mount) == []
