"""What a rebuild leaves behind. tests/engine/build/test_reproduce.py has whole ones."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from recorded import Site, sha

from sparkpin.build import reproduce
from sparkpin.build.record import layer_file, records_of
from sparkpin.core.errors import HostError
from sparkpin.core.paths import Paths
from sparkpin.host import daemon
from sparkpin.host.daemon import Daemon

STUBBORN = "#!/bin/sh\ntrap '' TERM\necho ready\nwhile :; do sleep 0.05; done\n"


def test_an_engine_that_does_not_stop_is_found_by_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pid file is what finds it, so nothing of the run goes before it has ended."""
    program = tmp_path / "dockerd"
    program.write_text(STUBBORN)
    program.chmod(0o755)
    started: list[subprocess.Popen[bytes]] = []

    def start_engine(paths: Paths, engine: Daemon) -> None:
        process = subprocess.Popen([program], stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout and process.stdout.readline() == b"ready\n"
        engine.pidfile.write_text(str(process.pid))

    monkeypatch.setattr(daemon, "STOP_TIMEOUT", 0.3)
    monkeypatch.setattr(reproduce, "start_engine", start_engine)
    monkeypatch.setattr(reproduce.Engine, "at", lambda url: None)
    monkeypatch.setattr(reproduce, "RUN", tmp_path)
    paths = Paths(tmp_path, tmp_path / "cache", tmp_path / "home")
    try:
        with reproduce.engine_apart(paths):
            pass
        with pytest.raises(HostError), reproduce.engine_apart(paths):
            pass
        left, folder = reproduce.daemon_of(paths), paths.work / "reproduce"
        assert left.pidfile.is_file() and folder.is_dir()
    finally:
        for process in started:
            process.kill()
            process.wait()
    reproduce.remove_run(left, folder)
    assert not folder.exists() and not left.folder.exists()


def test_what_differs_is_told_field_by_field(tmp_path: Path) -> None:
    site = Site.make(tmp_path)
    first, second = (records_of(site.paths, release)[0] for release in (site.first(), site.second()))
    lines = [*reproduce.differences((site.paths, first), (site.paths, second))]
    assert "/etc/passwd: mode 0644 -> 0600" in lines
    assert f"/usr/bin/dash: content {sha('shell')} -> {sha('new shell')}" in lines
    assert any(line.startswith("only in the image built now: /etc/odd") for line in lines)
    layer_file(site.paths, first.diff_ids[0]).unlink()
    *settings, last = reproduce.differences((site.paths, first), (site.paths, second))
    assert all(line.startswith("configuration: ") for line in settings) and str(tmp_path) in last


def test_only_root_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is fetched; with the command that does it."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(HostError) as caught:
        reproduce.reproduce(cast(Any, None), cast(Any, SimpleNamespace(tag="t")))
    assert "invoke reproduce t" in caught.value.next_step
