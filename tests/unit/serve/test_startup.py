"""A start as it is read off the log of vLLM and shown: stages, percents, the last one."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import made_releases
import pytest

from sparkpin.serve import startup, startup_bar, waiting

START = b"""(APIServer pid=1) INFO 11-22 02:30:25 [api_utils.py:347]   version 0.32.0
(EngineCore pid=26) INFO 11-22 02:30:45 [cpu_model_runner.py:68] Starting to load model /model...
Loading safetensors checkpoint shards:   0% Completed | 0/3 [00:00<?, ?it/s]
\rLoading safetensors checkpoint shards:  67% Completed | 2/3 [00:00<00:00, 162.20it/s]"""
REST = b"""
(EngineCore pid=26) INFO 11-22 02:30:45 [default_loader.py:501] Loading weights took 0.02 seconds
(EngineCore pid=26) INFO 11-22 02:30:46 [kv_cache_utils.py:2327] CPU KV cache size: 547,693 tokens, Maximum concurrency
Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  50%|#####     | 10/20 [00:01<00:01]"""
READY = b"\n(APIServer pid=1) INFO:     Application startup complete.\n"


def test_a_start_that_ends_while_it_is_asked_is_told_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked now and then before its log says that it answers; what the log says since then counts."""
    logs = iter((START + REST, START + REST + READY))
    monkeypatch.setattr(waiting, "ASK_SECONDS", -1.0)
    monkeypatch.setattr(waiting, "look", lambda *_: (None, next(logs)))
    monkeypatch.setattr(waiting.launch, "asks", lambda _: (True, "a token"))
    container: Any = None
    waiting.until_ready(container, made_releases.release(1), 60, tmp_path, print, fresh=True)
    last = startup.last(tmp_path)
    assert last and set(last.began) == set(startup.STAGES)


def test_stages_and_percents_of_a_start() -> None:
    watched = startup.Startup()
    assert watched.update(START, 20.04) and watched.text == "weights 67 % (2 of 3)"
    assert not watched.update(START, 21.0)
    assert watched.update(START + REST, 31.0) and watched.text == "graphs 50 % (10 of 20)"
    assert watched.update(START + REST + b"\nINFO:     Application startup complete.\n", 33.0)
    assert watched.text == "ready"
    assert watched.began == {
        "start": 0.0,
        "weights": 20.0,
        "compile": 31.0,
        "cache": 31.0,
        "graphs": 31.0,
        "ready": 33.0,
    }


@pytest.mark.parametrize("text", ["", "[]", '{"seconds": "long"}', '{"seconds": 1, "began": []}'])
def test_a_note_of_the_last_start_that_is_damaged_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / startup.FILE).write_text(text)
    assert startup.last(tmp_path) is None


def test_requests_under_way_are_waited_for_and_not_for_ever() -> None:
    said: list[str] = []
    left = iter([2, 1, 0])
    assert waiting.quiet_moment(lambda: next(left), 1000, said.append)
    assert said == ["waiting up to 1000 s for a moment without requests (2 under way)"]
    assert not waiting.quiet_moment(lambda: 1, 0, said.append)
    assert said[1:] == ["1 request under way: broken off by the switch"]
    assert not waiting.quiet_moment(lambda: None, 1000, said.append), "nobody knows"
    assert len(said) == 2, "nobody can tell"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_a_bar_shows_the_stage_against_the_last_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", screen := Terminal())
    monkeypatch.setenv("COLUMNS", "120")
    watched = startup.Startup()
    with startup_bar.shown(startup.LastStart(40.0, {}), print) as view:
        watched.update(START, 20.0)
        view.update(watched, START, 20.0)
    assert "weights 67 % (2 of 3)" in screen.getvalue() and "(the last start took 40 s)" in screen.getvalue()


def test_the_bar_is_never_full_and_grows_and_knows_slower_stages() -> None:
    last, watched = startup.LastStart(40.0, {"start": 0.0, "weights": 20.0}), startup.Startup()
    shares = [startup_bar.share(last, watched, float(seconds)) for seconds in range(0, 1000, 5)]
    assert shares == sorted(shares) and shares[0] == 0 and shares[-1] < 1
    watched.began["weights"] = 60.0  # three times as late: 20 s are left, as last time
    assert startup_bar.share(last, watched, 60.0) == pytest.approx(0.9 * 60 / 80)


def test_a_new_release_is_held_against_the_last_start_of_its_recipe(tmp_path: Path) -> None:
    for number in (1, 2):
        startup.keep(tmp_path / f"v{number}", made_releases.release(number), startup.Startup(), 10.0 * number, b"")
        os.utime(tmp_path / f"v{number}" / startup.FILE, (number, number))
    found = [startup.last(tmp_path / name) for name in ("v1", "new")]
    assert [one.seconds for one in found if one] == [10.0, 20.0]
