"""Starting an engine, and what a killed one leaves. tests/engine/host does it with real ones."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from sparkpin.core.errors import HostError
from sparkpin.core.paths import Paths
from sparkpin.host import daemon as daemons
from sparkpin.host.daemon import Daemon, mounts_below, owner_of, start_engine, stop_engine


def paths_in(folder: Path) -> Paths:
    return Paths(folder, folder / "cache", folder / "home")


def test_a_named_engine_that_does_not_answer_is_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")

    def started(*_: object, **__: object) -> None:
        raise AssertionError("another engine must not be started")

    monkeypatch.setattr(daemons.subprocess, "Popen", started)
    monkeypatch.setattr(daemons.subprocess, "run", started)
    with pytest.raises(HostError, match=r"none\.sock") as caught:
        start_engine(paths_in(tmp_path))
    assert "unset DOCKER_HOST" in caught.value.next_step


def test_only_root_starts_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemons.os, "geteuid", lambda: 1000)
    with pytest.raises(HostError, match="only root") as caught:
        start_engine(paths_in(tmp_path), Daemon.private(tmp_path))
    assert caught.value.next_step.startswith("sudo ")
    assert list(tmp_path.iterdir()) == []


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


def test_what_is_mounted_and_in_use_is_unmounted(tmpfs: Callable[[str], Path]) -> None:
    mount = tmpfs("1m") / "data"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", mount], check=True)
    with (mount / "used").open("w"):
        stop_engine(Daemon.private(mount / "engine", mount))
    assert mounts_below(mount) == []
