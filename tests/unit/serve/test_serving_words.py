"""What is read off a server's log, and what is written for people: pure, from logs as vLLM writes them."""

from __future__ import annotations

import dataclasses
import io
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import made_releases
import pytest
from evidence_samples import PROJECT

from sparkpin.core.errors import HostError, InputError
from sparkpin.core.paths import Paths
from sparkpin.releases.record import Releases
from sparkpin.serve import crash_facts, keys, memory_limit, startup, startup_bar, status, unit, waiting
from sparkpin.serve.crash_causes import CAUSES
from sparkpin.serve.postmortem import Death, first_error, report
from sparkpin.serve.served import Served

START = b"""(APIServer pid=1) INFO 11-22 02:30:25 [api_utils.py:347]   version 0.32.0
(EngineCore pid=26) INFO 11-22 02:30:45 [cpu_model_runner.py:68] Starting to load model /model...
Loading safetensors checkpoint shards:   0% Completed | 0/3 [00:00<?, ?it/s]
\rLoading safetensors checkpoint shards:  67% Completed | 2/3 [00:00<00:00, 162.20it/s]"""
REST = b"""
(EngineCore pid=26) INFO 11-22 02:30:45 [default_loader.py:501] Loading weights took 0.02 seconds
(EngineCore pid=26) INFO 11-22 02:30:46 [kv_cache_utils.py:2327] CPU KV cache size: 547,693 tokens, Maximum concurrency
Capturing CUDA graphs (mixed prefill-decode, PIECEWISE):  50%|#####     | 10/20 [00:01<00:01]"""
INIT = """(EngineCore pid=170) ERROR 11-22 03:55:16 [core.py:1510] EngineCore failed to start.
(EngineCore pid=170) ERROR 11-22 03:55:16 [core.py:1510] Traceback (most recent call last):
(EngineCore pid=170) ERROR 11-22 03:55:16 [core.py:1510]   File "core.py", line 1490, in run_engine_core
(EngineCore pid=170) ERROR 11-22 03:55:16 [core.py:1510]     raise RuntimeError(
(EngineCore pid=170) ERROR 11-22 03:55:16 [core.py:1510] RuntimeError: Insufficient space in /dev/shm for shared
(APIServer pid=7) Traceback (most recent call last):
(APIServer pid=7)   File "vllm", line 10, in <module>
(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause above.
sparkpin: ended with 1
"""


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


def dead(log: str, how: str = "exited with 1", **more: object) -> Death:
    values = {"tag": "sparkpin/r:base-1", "recipe": "r", "restarts": 0, "health": "", "machine": ()} | more
    return Death(how=how, log=log.encode(), **values)  # type: ignore[arg-type]


def test_the_first_error_is_the_cause_and_no_consequence() -> None:
    lines = report(dead(INIT))
    assert lines[1] == "first error: RuntimeError: Insufficient space in /dev/shm for shared"
    assert lines[2] == "that means: its processes share more memory than /dev/shm has"
    assert lines[-1] == "  sparkpin: ended with 1"


def test_what_was_before_the_last_answer_is_no_cause() -> None:
    old = "ValueError: a request that was wrong\n"
    log = (
        old + 'INFO:     127.0.0.1 - "POST /v1/completions HTTP/1.1" 200 OK\nEngineDeadError\nsparkpin: ended with 0\n'
    )
    assert "ValueError" not in "\n".join(report(dead(log)))
    assert "killed from outside" in report(dead(log))[2]


def test_an_answer_of_500_is_a_consequence() -> None:
    """As vLLM 0.32 wrote when its engine process was killed while a request was under way."""
    log = (
        'INFO:     127.0.0.1:37168 - "POST /v1/completions HTTP/1.1" 200 OK\n'
        "(APIServer pid=7) ERROR 11-22 06:41:16 [async_llm.py:906] Traceback (most recent call last):\n"
        '(APIServer pid=7) ERROR 11-22 06:41:16 [async_llm.py:906]   File "core_client.py", line 1235, in get_output\n'
        "(APIServer pid=7) ERROR 11-22 06:41:16 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: Engine\n"
        'INFO:     127.0.0.1:53300 - "POST /v1/completions HTTP/1.1" 500 Internal Server Error\n'
        "sparkpin: ended with 0, though nobody asked it to\n"
    )
    lines = report(dead(log))
    assert lines[1].startswith("first error: vllm.v1.engine.exceptions.EngineDeadError")
    assert lines[2] == "that means: a process of the server was killed from outside, or crashed without a word"


def test_of_a_server_that_was_started_again_the_life_that_ended_counts() -> None:
    log = (
        f"sparkpin: starting the server\n{INIT}sparkpin: starting the server\nINFO 11-22 02:30:25 [a.py:1] version 0\n"
    )
    lines = report(dead(log, "is running", restarts=1))
    assert lines[0].endswith("is running; Docker started it again once")
    assert "/dev/shm" in lines[1]


@pytest.mark.parametrize(
    ("line", "means"),
    [
        ("vllm: error: unrecognized arguments: --no-such-flag", "does not know a flag"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "the GPU's memory"),
        (
            "ValueError: Free memory on device cuda:0 (90.1/121.7 GiB) on startup is less than desired GPU memory "
            "utilization (0.85, 103.4 GiB).",
            "less is free than --gpu-memory-utilization",
        ),
        (
            "ValueError: To serve at least one request with the models's max seq len (262144), (12.0 GiB KV cache is "
            "needed, which is larger than the available KV cache memory (8.0 GiB).",
            "does not hold one request",
        ),
        ("RuntimeError: CUDA error: no kernel image is available for execution on the device", "no code for this GPU"),
        ("ImportError: _C.abi3.so: undefined symbol: _ZN3c104cuda9SetDeviceEi", "do not fit together"),
        ("OSError: [Errno 28] No space left on device", "is full"),
        ("sparkpin: ended: the kernel killed 1 of its processes for want of memory", "passed its memory limit"),
        ("sparkpin: ended: it answered no request any more", "it hung"),
    ],
)
def test_known_causes(line: str, means: str) -> None:
    found = [text for text in report(dead(f"{line}\n")) if text.startswith("that means: ")]
    assert found and means in found[0]


def test_a_line_of_information_is_no_cause() -> None:
    log = (
        "(APIServer pid=1) INFO 11-22 02:30:47 [hf.py:648] Detected the chat template content format to be 'string'.\n"
    )
    assert not [text for text in report(dead(log)) if text.startswith(("that means", "first error"))]
    assert first_error(log.splitlines()) == ""


def test_every_mend_can_be_filled_in() -> None:
    assert all(cause.mend.format(recipe="r", tag="t") for cause in CAUSES)


def test_what_the_kernel_said_since_the_start() -> None:
    text = (
        "[   10.000000] Memory cgroup out of memory: Killed process 7 (old)\n"
        "[  100.500000] NVRM: Xid (PCI:0000:01:00): 31, pid=8, name=VLLM\n[  101.0] eth0: up\n"
    )
    lines = crash_facts.kernel_lines(text, "1970-01-01T00:01:00.123456789Z", boot=0.0)
    assert lines == ["kernel: NVRM: Xid (PCI:0000:01:00): 31, pid=8, name=VLLM"]
    assert crash_facts.kernel_lines(text, "", boot=0.0) == []


@pytest.mark.parametrize(
    ("host", "local"), [("127.0.0.1", True), ("::1", True), ("0.0.0.0", False), ("10.1.2.3", False)]
)
def test_who_reaches_an_address(host: str, local: bool) -> None:
    assert keys.is_local(host) == local


def test_a_key_that_others_can_read_or_that_is_none_is_refused(tmp_path: Path) -> None:
    paths = Paths(tmp_path, tmp_path / "cache", tmp_path / "home")
    key = keys.key_for(paths, "r", "0.0.0.0")
    assert key == keys.key_for(paths, "r", "0.0.0.0") and keys.key_for(paths, "r", "127.0.0.1") is None
    file = keys.path_of(paths, "r")
    file.chmod(0o640)
    with pytest.raises(InputError, match="mode 640 lets others read"):
        keys.key_for(paths, "r", "0.0.0.0")
    file.chmod(0o600)
    file.write_text("short\n")
    with pytest.raises(InputError, match="at least 16"):
        keys.key_for(paths, "r", "0.0.0.0")


def test_the_page_cache_is_dropped_where_that_is_allowed(tmp_path: Path) -> None:
    said: list[str] = []
    assert memory_limit.drop_page_cache(said.append, tmp_path / "drop_caches")
    assert (tmp_path / "drop_caches").read_text() == "1\n"
    assert not memory_limit.drop_page_cache(said.append, tmp_path / "absent/drop_caches")
    assert "sudo sh -c 'echo 1 > /proc/sys/vm/drop_caches'" in said[-1]


@pytest.mark.parametrize("system", [True, False])
def test_systemd_takes_the_unit(tmp_path: Path, system: bool) -> None:
    program = tmp_path / "in voke"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    text = unit.unit_text(
        recipe="r",
        invoke=program,
        project=tmp_path,
        env={"SPARKPIN_HOME": "/a b/100%"},
        arguments=("--port", "8001"),
        system=system,
    )
    assert ("Requires=docker.service" in text) == system
    assert 'Environment="SPARKPIN_HOME=/a b/100%%"' in text
    text = text.replace("Requires=docker.service\n", "").replace(" docker.service", "")  # a machine of CI has none
    file = tmp_path / unit.name_of("r")
    file.write_text(text)
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", file], capture_output=True, text=True)
    assert done.returncode == 0 and str(file.name) not in done.stderr, done.stderr


def test_two_fit_at_once_only_where_a_plan_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limit, "available", lambda: 8 << 30)
    plan = SimpleNamespace(hints=("--gpu-memory-utilization 0.5 asks for no more than is free",))
    small, large = memory_limit.Room(4 << 30, 6 << 30, plan), memory_limit.Room(9 << 30, 12 << 30, plan)  # type: ignore[arg-type]
    assert memory_limit.fits_beside(small) and not memory_limit.fits_beside(large)
    assert not memory_limit.fits_beside(memory_limit.Room(1 << 30, 2 << 30, None, "no rule for this model"))
    release = SimpleNamespace(tag="sparkpin/r:base-1")
    memory_limit.require_room(small, release)  # type: ignore[arg-type]
    with pytest.raises(HostError, match=r"r:base-1 needs 9.00 GiB, and 8.00 GiB are free\n  next: .*utilization 0.5"):
        memory_limit.require_room(large, release)  # type: ignore[arg-type]


def test_logs_leave_out_the_health_check_and_nothing_else() -> None:
    watch = [
        b'INFO:     127.0.0.1:37160 - "POST /v1/completions HTTP/1.1" 200 OK\n',
        b'INFO:     127.0.0.1:37162 - "GET /metrics HTTP/1.1" 200 OK\n',
        b'INFO:     172.20.0.1:59438 - "GET /health HTTP/1.1" 200 OK\n',
    ]
    told = [
        b'INFO:     172.20.0.1:59442 - "POST /v1/completions HTTP/1.1" 200 OK\n',
        b'INFO:     127.0.0.1:37160 - "POST /v1/completions HTTP/1.1" 500 Internal Server Error\n',
        b'INFO:     172.20.0.1:59442 - "GET /v1/models HTTP/1.1" 200 OK\n',
        b"no line yet",
    ]
    assert status.told_to_people(b"".join([*watch, *told])) == told


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


def test_with_nothing_served_the_hint_names_the_one_recipe_that_is_current(tmp_path: Path) -> None:
    paths = Paths(PROJECT, tmp_path / "cache", tmp_path / "home")
    assert status.how_to_serve(paths) == "invoke up"
    Releases(paths).point(made_releases.release(1, "passed"))
    assert status.how_to_serve(paths) == "invoke serve --recipe tiny"
    Releases(paths).point(made_releases.release(2, "passed", recipe="other"))
    assert status.how_to_serve(paths) == "invoke serve"
    assert status.how_to_serve(paths, "other") == "invoke serve --recipe other"
    assert status.how_to_serve(paths, "qwen3.5-122b") == "invoke serve --recipe qwen3.5-122b"
    assert status.how_to_serve(paths, "nosuch") == "invoke recipe list"


def test_a_server_of_another_home_is_marked(tmp_path: Path) -> None:
    paths = Paths(PROJECT, tmp_path / "cache", tmp_path / "home")
    own = Served(str(paths.home), "tiny", "sparkpin/tiny:v2-1", "c", "127.0.0.1", 8000, "m", "running", True)
    assert status.row(paths, own, None)[0] == "tiny"
    assert status.row(paths, dataclasses.replace(own, home="/elsewhere"), None)[0] == "tiny (another home)"
