"""Process 1: its count of restarts, where it may start a server once more and where not; and whom torch's store is
connected with. What it would signal, and the server, are not there: as process 1 it ends every other process."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparkpin.releases import inside


@pytest.fixture
def lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What ends it, with a server that fails at once: for a rank, the restarts counted so far and those allowed. Who
    waits without a server is asked to end."""
    handlers: dict[int, Any] = {}
    for module, name, value in (
        (inside, "HERE", tmp_path),
        (inside, "STATE", tmp_path / "tmp"),
        (inside, "RESTARTS", tmp_path / "restarts"),
        (inside, "reap", lambda pid: 1),
        (inside.os, "kill", lambda *_: None),
        (inside.signal, "signal", handlers.__setitem__),
        (inside.signal, "setitimer", lambda *_: None),
        (inside.time, "sleep", lambda _: handlers[inside.signal.SIGTERM](inside.signal.SIGTERM, None)),
        (inside.subprocess, "Popen", lambda argv: SimpleNamespace(pid=0)),
    ):
        monkeypatch.setattr(module, name, value)

    def live(rank: int | None, counted: int | None, allowed: int, **more: int) -> int:
        settings: dict[str, Any] = {"socket": str(tmp_path / "socket"), "restarts": allowed, **more}
        settings |= {} if rank is None else {"rank": rank, "store": ("10.0.0.1", 29501)}
        (tmp_path / inside.SETTINGS).write_text(json.dumps(settings))
        inside.RESTARTS.unlink(missing_ok=True)
        if counted is not None:
            inside.RESTARTS.write_text(str(counted))
        return inside.run(["server"])

    return live


@pytest.mark.parametrize("rank", [None, 0, 1])
def test_at_its_limit_it_ends_with_0_and_says_so(
    lives: Any, rank: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Docker's policy is "on-failure"; on another machine, where it is "unless-stopped", once it is asked to."""
    assert lives(rank, None, 1) == 1
    assert inside.STAYS_DOWN not in capsys.readouterr().out
    assert lives(rank, 0, 1) == 0
    assert f"sparkpin: {inside.STAYS_DOWN}" in capsys.readouterr().out.splitlines()[-1]
    assert lives(rank, 1, 3) == 1, "the limit was raised"


@pytest.mark.parametrize(("left", "code"), [((1 << 30) - 1, inside.NO_RESERVE), (1 << 30, 7)])
def test_below_the_machine_s_reserve_it_ends_the_server(
    lives: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int, code: int
) -> None:
    """Or the server ends by itself, a moment later."""
    killed = threading.Event()
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal:  9999999 kB\nMemFree: 1 kB\nMemAvailable:   {left // 1024} kB\nBuffers: 1 kB\n")
    monkeypatch.setattr(inside, "MEMINFO", meminfo)
    monkeypatch.setattr(inside, "GUARD_SECONDS", 0.01)
    monkeypatch.setattr(inside.os, "kill", lambda *_: killed.set())
    monkeypatch.setattr(inside, "reap", lambda pid: -9 if killed.wait(0.5) else 7)
    assert lives(None, None, 2, floor=1 << 30) == code


def test_a_full_disk_costs_no_more_than_the_count(lives: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lives(None, 1, 3) == 1

    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(inside.RESTARTS.with_suffix(".new").__class__, "write_text", full)
    inside.write_restarts(7)
    assert inside.restarts() == 2, "the count that was there"


def test_a_stop_before_there_is_a_server_ends_it(lives: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: dict[int, Any] = {}
    monkeypatch.setattr(inside.signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(inside, "load_settings", lambda: handlers[inside.signal.SIGINT](inside.signal.SIGINT, None))
    with pytest.raises(SystemExit) as ended:
        lives(None, None, 1)
    assert ended.value.code == 0


HEAD, WORKER, OTHER = "0100000A", "0200000A", "0300000A"  # 10.0.0.1, .2, .3, as proc(5) has them here
V6 = "0000000000000000FFFF0000"
TCP = f"""  sl  local_address rem_address   st tx_queue
   0: {HEAD}:733D 00000000:0000 0A 0
   1: {HEAD}:733D {WORKER}:C7A6 01 0
   2: {HEAD}:733D {HEAD}:A9AE 01 0
   3: {HEAD}:733D {OTHER}:C7A6 08 0
   4: {HEAD}:8E3F {OTHER}:E762 01 0
"""
TCP6 = f"""  sl  local_address                         remote_address                        st
   0: {V6}{WORKER}:C7A7 {V6}{HEAD}:733D 01
   1: {V6}{HEAD}:A9AE {V6}{HEAD}:733D 01
"""


def test_the_connections_of_workers_to_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those that have ended, nor of other ports, nor rank 0's own."""
    tables = tmp_path / "tcp", tmp_path / "tcp6"
    for table, text in zip(tables, (TCP, TCP6), strict=True):
        table.write_text(text)
    monkeypatch.setattr(inside, "SOCKETS", tables)
    found = inside.connections(("10.0.0.1", 29501))
    assert found == {f"{WORKER}:C7A6", f"{WORKER}:C7A7"}
