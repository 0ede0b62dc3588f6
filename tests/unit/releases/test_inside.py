"""Process 1: its count of restarts, where it may start a server once more and where not; and whom torch's store is
connected with. What it would signal, and the server, are not there: as process 1 it ends every other process."""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import socket
import struct
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from watched import until

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
        (inside, "watch", lambda settings, end: None),
        (inside, "wait_for_socket", lambda path: threading.Event().wait()),
        (inside.os, "kill", lambda *_: None),
        (inside.signal, "signal", handlers.__setitem__),
        (inside.time, "sleep", lambda _: handlers[inside.signal.SIGTERM](inside.signal.SIGTERM, None)),
        (inside.subprocess, "Popen", lambda argv: SimpleNamespace(pid=0)),
    ):
        monkeypatch.setattr(module, name, value)

    def live(rank: int | None, counted: int | None, allowed: int, **more: int) -> int:
        settings: dict[str, Any] = {"socket": str(tmp_path / "socket"), "restarts": allowed, "floor": 0, **more}
        settings |= {} if rank is None else {"rank": rank, "store": ("10.0.0.1", 29501)}
        (tmp_path / inside.SETTINGS).write_text(json.dumps(settings))
        inside.RESTARTS.unlink(missing_ok=True)
        if counted is not None:
            inside.RESTARTS.write_text(str(counted))
        return inside.Life().run(["server"])

    return live


@pytest.mark.parametrize(("left", "code"), [((1 << 30) - 1, inside.NO_RESERVE), (1 << 30, 7)])
def test_below_the_machine_s_reserve_it_ends_the_server(
    lives: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int, code: int
) -> None:
    """Or the server ends by itself, a moment later. It does not start before so much is left."""
    killed = threading.Event()
    meminfo = tmp_path / "meminfo"

    def have(left: int) -> None:
        meminfo.write_text(f"MemTotal:  9999999 kB\nMemFree: 1 kB\nMemAvailable:   {left // 1024} kB\nBuffers: 1 kB\n")

    def reap(_: int) -> int:
        meminfo.unlink()  # for a moment the kernel does not tell
        killed.wait(0.05)
        have(left)
        return -9 if killed.wait(0.5) else 7

    have(0)
    monkeypatch.setattr(inside, "MEMINFO", meminfo)
    monkeypatch.setattr(inside, "GUARD_SECONDS", 0.01)
    monkeypatch.setattr(inside.os, "kill", lambda *_: killed.set())
    monkeypatch.setattr(inside, "reap", reap)
    slept = list[float]()  # until another program has ended
    monkeypatch.setattr(inside.time, "sleep", lambda seconds: (slept.append(seconds), have(1 << 30)))
    assert (lives(None, None, 2, floor=1 << 30), slept) == (code, [1])


def test_a_worker_that_stays_down_has_left_the_store(lives: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 would take it for one that is there, and wait for its next step."""
    handlers: dict[int, Any] = {}
    held, left, (ours, theirs) = threading.Event(), list[bytes](), socket.socketpair()
    theirs.settimeout(5)

    def hold(_: Any, links: dict[str, socket.socket], __: Any) -> None:
        links["its own"] = ours
        held.set()

    def sleep(_: float) -> None:
        left.append(theirs.recv(1))
        handlers[signal.SIGTERM](signal.SIGTERM, None)

    monkeypatch.setattr(inside.signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(inside, "connections", lambda _: {"0200000A:C7A6"})
    monkeypatch.setattr(inside, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(inside, "hold", hold)
    monkeypatch.setattr(inside, "reap", lambda _: int(held.wait(5)))
    monkeypatch.setattr(inside.time, "sleep", sleep)
    with ours, theirs:
        assert lives(1, 0, 1) == 0 and left == [b""]


def test_a_full_disk_costs_no_more_than_the_count(lives: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lives(None, 1, 3) == 1

    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(inside.RESTARTS.with_suffix(".new").__class__, "write_text", full)
    inside.write(inside.RESTARTS, "7")
    assert inside.restarts() == 2, "the count that was there"


def test_a_stop_before_there_is_a_server_ends_it(lives: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: dict[int, Any] = {}
    monkeypatch.setattr(inside.signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(inside, "load_settings", lambda: handlers[inside.signal.SIGINT](inside.signal.SIGINT, None))
    with pytest.raises(SystemExit) as ended:
        lives(None, None, 1)
    assert ended.value.code == 0


@pytest.fixture
def store() -> Any:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.mark.parametrize(("how", "ends"), [("reset", True), ("closed", False), ("refused", True)])
def test_a_connection_to_the_store_that_breaks_is_told_from_one_that_is_closed(
    store: Any, monkeypatch: pytest.MonkeyPatch, how: str, ends: bool
) -> None:
    """Reset, as by a machine that has been started again; the silence of one without power, which takes half a minute,
    is in tests/engine/serve/test_pair.py."""
    ended, links, address = list[int](), dict[str, socket.socket](), store.getsockname()
    monkeypatch.setattr(inside, "LOOK_SECONDS", 0.0)
    if how == "refused":
        store.close()
    thread = threading.Thread(target=inside.hold, args=(address, links, lambda code, _: ended.append(code)))
    thread.start()
    if how != "refused":
        link, other = store.accept()
        until(lambda: links != {})
        assert links.keys() == {f"0100007F:{other[1]:04X}"}, "as the kernel's table has it"
        if how == "reset":
            link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        link.close()
    thread.join(10)
    assert ended == [inside.PEER_LOST] * ends


def test_settings_that_the_host_is_about_to_write_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inside, "HERE", tmp_path)
    (tmp_path / inside.SETTINGS).write_text('{"restarts": ')
    timer = threading.Timer(0.3, (tmp_path / inside.SETTINGS).write_text, ['{"restarts": 3}'])
    timer.start()
    assert inside.load_settings() == {"restarts": 3}
    timer.join()


SOON = {"interval": 0.05, "failures": 2, "start": 0}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the server answers: `ask` and its counters; and the end of whoever watches it."""
    heard = SimpleNamespace(answers=True, moves=False, ended=[])
    count = itertools.count()

    def ask(settings: Any, patience: float) -> str:
        if not heard.answers:
            time.sleep(0.1)
            raise inside.Silent("timed out")
        return "a token"

    monkeypatch.setattr(inside, "STATE", tmp_path)
    monkeypatch.setattr(inside, "RESTARTS", tmp_path / "restarts")
    monkeypatch.setattr(inside, "ask", ask)
    monkeypatch.setattr(inside, "work_done", lambda settings: [f"tokens {next(count) if heard.moves else 0}"])
    end = lambda code, why: heard.ended.append(code)  # noqa: E731
    heard.thread = threading.Thread(target=inside.watch, args=(SOON, end), daemon=True)
    heard.thread.start()
    until(lambda: (tmp_path / "watch").exists() and inside.health() == 0)
    yield heard
    heard.answers, heard.moves = False, False
    heard.thread.join(10)
    assert heard.ended == [inside.HUNG], "a server that writes no token is ended"


def test_a_process_1_that_stands_still_is_not_healthy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody stopped it (SIGSTOP): what it has written last is old."""
    monkeypatch.setattr(inside, "STATE", tmp_path)
    for seconds, code in ((60, 0), (-1, 1)):
        seen = {"well": True, "text": "a token", "until": time.monotonic() + seconds}
        (tmp_path / "watch").write_text(json.dumps(seen))
        assert inside.health() == code


def test_a_busy_server_is_healthy_and_goes_on(server: Any) -> None:
    server.answers, server.moves = False, True
    end = time.monotonic() + 1
    while time.monotonic() < end:
        assert inside.health() == 0
    assert server.ended == []


def test_restarts_are_there_again_after_a_time_without_one(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    inside.write(inside.RESTARTS, "3")
    monkeypatch.setattr(inside, "REFILL_SECONDS", 0.0)
    until(lambda: inside.restarts() == 0)
