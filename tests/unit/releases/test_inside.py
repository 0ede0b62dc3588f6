"""Process 1, its count of restarts: where it may start a server once more, and where not. What it would signal, and the
server, are not there: as process 1 it ends every other process."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sparkpin.releases import inside


@pytest.fixture
def lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What ends it, and how often it started a server that fails at once: for a rank, the restarts counted so far and
    those allowed."""
    started = list[Any]()

    def pause() -> None:
        raise inside.Asked

    def popen(argv: Any) -> Any:
        started.append(argv)
        return SimpleNamespace(pid=0)

    for module, name, value in (
        (inside, "HERE", tmp_path),
        (inside, "STATE", tmp_path / "tmp"),
        (inside, "RESTARTS", tmp_path / "restarts"),
        (inside, "DOWN", tmp_path / "down"),
        (inside, "refusal", lambda *_: ""),
        (inside, "reap", lambda pid: 1),
        (inside.os, "kill", lambda *_: None),
        (inside.signal, "signal", lambda *_: None),
        (inside.signal, "setitimer", lambda *_: None),
        (inside.signal, "pause", pause),
        (inside.subprocess, "Popen", popen),
    ):
        monkeypatch.setattr(module, name, value)

    def live(rank: int | None, counted: int | None, allowed: int) -> tuple[int, int]:
        settings: dict[str, Any] = {"socket": str(tmp_path / "socket"), "restarts": allowed}
        settings |= {} if rank is None else {"peers": {"rank": rank}}
        (tmp_path / inside.SETTINGS).write_text(json.dumps(settings))
        inside.RESTARTS.unlink(missing_ok=True)
        if counted is not None:
            inside.write_restarts(counted)
        started.clear()
        return inside.run(["server"]), len(started)

    return live


@pytest.mark.parametrize("rank", [None, 0])
def test_here_it_ends_with_0_at_its_limit(lives: Any, rank: int | None) -> None:
    """Docker's policy is "on-failure"."""
    assert lives(rank, None, 1) == (1, 1) and lives(rank, 0, 1) == (0, 1)


def test_on_another_machine_it_waits_at_its_limit_and_starts_no_server(
    lives: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Docker's policy is "unless-stopped": whatever it ends with, it is started again."""
    assert lives(1, None, 1) == (1, 1) and lives(1, 0, 1) == (1, 1)
    assert inside.STAYS_DOWN not in capsys.readouterr().out
    assert lives(1, 1, 1) == (0, 0), "0: it was asked to end"
    assert f"sparkpin: {inside.STAYS_DOWN}" in capsys.readouterr().out.splitlines()[-1]
    assert lives(1, 1, 3) == (1, 1), "the limit was raised"


@pytest.mark.parametrize("allowed", [0, 1])
def test_after_a_boot_within_its_limit_it_starts_again(lives: Any, allowed: int) -> None:
    """The last life that it may have was ended by Docker, and did not fail."""
    assert lives(1, allowed, allowed) == (1, 1)
