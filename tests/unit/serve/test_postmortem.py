"""Why a server ended, from logs as vLLM writes them."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from heard import heard
from places import DATA

from sparkpin.core.paths import Paths
from sparkpin.host.engine import Engine
from sparkpin.releases.postmortem import Cause, Death, cause, causes, first_error, report
from sparkpin.serve import crash_facts, linked
from sparkpin.serve.cluster import HERE, Machine
from sparkpin.serve.linked import Part
from sparkpin.serve.served import RELEASE_LABEL

CASES = yaml.safe_load((DATA / "crashes.yaml").read_text())
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
KILLED = """(APIServer pid=7) ERROR 11-22 06:41:16 [async_llm.py:906] AsyncLLM output_handler failed.
(APIServer pid=7) ERROR 11-22 06:41:16 [async_llm.py:906] Traceback (most recent call last):
(APIServer pid=7) ERROR 11-22 06:41:16 [async_llm.py:906]   File "core_client.py", line 1235, in get_output
(APIServer pid=7) ERROR 11-22 06:41:16 [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: Engine
"""
STREAMS = """(APIServer pid=7) ERROR 11-22 06:41:16 [serving.py:929] Error in chat completion stream generator.
(APIServer pid=7) ERROR 11-22 06:41:16 [serving.py:929] Traceback (most recent call last):
(APIServer pid=7) ERROR 11-22 06:41:16 [serving.py:929]   File "serving.py", line 600, in chat
(APIServer pid=7) ERROR 11-22 06:41:16 [serving.py:929] vllm.v1.engine.exceptions.EngineDeadError: EngineCore
"""
ANSWER = 'INFO:     127.0.0.1:3 - "POST /v1/chat/completions HTTP/1.1" 200 OK\n'
END = "sparkpin: ended with 0, though nobody asked it to\n"


def dead(log: str, how: str = "exited with 1", **more: object) -> Death:
    values = {"tag": "sparkpin/r:base-1", "recipe": "r", "restarts": 0, "health": "", "machine": ()} | more
    return Death(how=how, log=log.encode(), **values)  # type: ignore[arg-type]


def cause_of(log: str) -> Cause:
    found = cause(dead(log))
    assert found, log
    return found


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_a_log_comes_to(case: dict[str, str]) -> None:
    error, found = first_error(case["log"].splitlines()), cause(dead(case["log"]))
    assert case["error"] in error and "[type=" not in error
    assert ("means" in case) == bool(found)
    assert found is None or case["means"] in f"{found.meaning} {found.remedy}"


def test_no_sample_of_one_kind_gets_another_kind_s_cause() -> None:
    """Alone, within a traceback of the engine, and after an answer that came when the engine had died already."""
    assert len(causes()) >= 45
    tried = 0
    for kind in causes():
        assert kind.samples, kind.meaning
        for sample in kind.samples:
            engine = "(EngineCore pid=9) ERROR 11-22 03:55:16 [core.py:1510] "
            lines = ["EngineCore encountered a fatal error.", "Traceback (most recent call last):", "  File x", sample]
            logged = "".join(f"{engine}{line}\n" for line in lines)
            for log in (f"{sample}\n", logged, f"{ANSWER}{logged}{KILLED}{STREAMS}{ANSWER}{END}"):
                if kind.weight == "consequence" and log != f"{sample}\n":
                    continue
                tried += 1
                assert cause_of(log) is kind, (sample, cause_of(log).meaning)
    assert tried > 200


def test_causes_are_read_for_a_death_alone() -> None:
    """They took longer than all else that `status` and `rollback` do."""
    asked = (
        "import sparkpin.serve.status, sparkpin.releases.rollback\nfrom sparkpin.releases.postmortem import causes\n"
    )
    subprocess.run([sys.executable, "-c", f"{asked}assert causes.cache_info().misses == 0"], check=True)


def test_the_last_lines_are_shown_where_no_cause_is_known() -> None:
    """Else they say the same once more."""
    known, unknown = report(dead(INIT)), report(dead("words of a program\nmore\n" + END))
    assert known[-1].startswith("what to do") and "Engine core init" not in "\n".join(known)
    assert any("words of a program" in line for line in unknown)


@pytest.mark.parametrize("kind", causes(), ids=lambda kind: kind.meaning[:30])
def test_a_remedy_can_be_filled_in(kind: Cause) -> None:
    assert "{" not in kind.remedy.format(recipe="r", tag="t") and "{" not in kind.meaning


def test_what_was_before_the_last_answer_is_no_cause() -> None:
    log = f"ValueError: a request that was wrong\n{ANSWER}EngineDeadError\n{END}"
    assert "ValueError" not in "\n".join(report(dead(log)))
    assert cause_of(log).weight == "consequence"


@pytest.mark.parametrize("log", [ANSWER + KILLED + END, ANSWER + STREAMS + KILLED + ANSWER + END, STREAMS + END])
def test_one_kill_has_one_cause_whatever_the_traffic(log: str) -> None:
    """As vLLM 0.32 wrote when its engine process was killed: idle, and with streams under way."""
    assert "killed from outside" in cause_of(log).meaning


def test_an_error_that_nobody_knows_gets_no_cause_of_what_followed() -> None:
    traceback = "Traceback (most recent call last):\n  File x\nKeyError: 'a name that is new'\n"
    log = f"{traceback}{KILLED}RuntimeError: gloo/transport/tcp/pair.cc:534] Connection closed by peer\n{END}"
    assert cause(dead(log)) is None and "a name that is new" in first_error(log.splitlines())


def test_of_a_server_that_was_started_again_the_life_that_ended_counts() -> None:
    log = (
        f"sparkpin: starting the server\n{INIT}sparkpin: starting the server\nINFO 11-22 02:30:25 [a.py:1] version 0\n"
    )
    lines = report(dead(log, "is running", restarts=1))
    assert lines[0].endswith("Docker started it again 1 time")
    assert "/dev/shm" in lines[1]


def test_a_line_without_an_end_takes_no_time() -> None:
    """An image in a request is a word of a million letters: patterns that begin anew at each took minutes."""
    begin = time.process_time()
    assert report(dead("A" * 1_000_000 + "\nValueError: late\n" + END))[1].endswith("ValueError: late")
    assert time.process_time() - begin < 2


def test_a_line_of_information_is_no_cause() -> None:
    log = (
        "(APIServer pid=1) INFO 11-22 02:30:47 [hf.py:648] Detected the chat template content format to be 'string'.\n"
    )
    assert not [text for text in report(dead(log)) if text.startswith(("that means", "first error"))]
    assert first_error(log.splitlines()) == ""


KERNEL = """[   10.000000] Memory cgroup out of memory: Killed process 7 (old)
[  100.500000] NVRM: Xid (PCI:0000:01:00): 31, pid=8, name=VLLM
[  100.6] NVRM: nvCheckOkFailedNoLog: Check failed: Out of memory [NV_ERR_NO_MEMORY] (0x00000051) returned from x
[  100.7] NVRM: nvCheckOkFailedNoLog: Check failed: Out of memory [NV_ERR_NO_MEMORY] (0x00000051) returned from x
[  101.0] eth0: up
[  101.1] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),oom_memcg=/system.slice/docker-2b.scope,task=vllm,pid=9
[  101.2] Memory cgroup out of memory: Killed process 9 (vllm) total-vm:286108kB
[  101.3] oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),oom_memcg=/docker/1a,task=vllm,pid=8
[  101.500000] spark kernel: NVRM: GPU 000f:01:00.0: GPU has fallen off the bus.
"""


def test_what_the_kernel_said_since_the_start() -> None:
    """By dmesg or by journalctl; each line once, since they come in bursts."""
    lines = crash_facts.kernel_lines(KERNEL, "1970-01-01T00:01:00.123456789Z", boot=0.0, container="1a")
    assert ["nvCheck" in lines[0], "docker/1a" in lines[1], "GPU 000f" in lines[2]] == [True] * 3
    assert crash_facts.kernel_lines(KERNEL, "", boot=0.0, container="1a") == []


def test_an_empty_journal_says_no_more_than_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """journalctl's answer to a user who may not read the kernel's messages."""
    found = []
    for journal in (None, "-- No entries --\n", KERNEL):
        output = {"dmesg": None, "journalctl": journal}
        monkeypatch.setattr(crash_facts.machine, "output", lambda argv, output=output: output.get(argv[0]))
        found.append(crash_facts.machine_lines({"HostConfig": {}, "Created": "1970-01-01T00:00:00Z"})[-1])
    assert found[0] == found[1] != found[2]


def container(log: str, *, policy: str = "on-failure", health: str = "unknown", **state: Any) -> Any:
    attrs = {
        "RestartCount": state.pop("restarts", 0),
        "State": {"Status": "exited", "ExitCode": 1, "FinishedAt": "2026-01-01T00:00:00Z", **state},
        "HostConfig": {"RestartPolicy": {"Name": policy}},
    }
    named = {"name": "c", "status": attrs["State"]["Status"], "labels": {RELEASE_LABEL: "sparkpin/r:base-1"}}
    return SimpleNamespace(attrs=attrs, health=health, logs=lambda **_: log.encode(), **named)


LIFE = "sparkpin: starting the server\n"
RUNS = {"Status": "running", "ExitCode": 0, "restarts": 1}


@pytest.mark.parametrize(
    ("log", "state", "kept"),
    [
        (LIFE + INIT, {}, True),
        (LIFE + INIT + LIFE, RUNS, True),  # it runs again; the reason is as good as gone
        (LIFE + INIT.replace(INIT.splitlines()[-1], "") + LIFE, RUNS, True),  # process 1 went first, and wrote no end
        (LIFE + INIT, {"policy": "no"}, False),  # a start that failed, which `serve` has reported
        (LIFE + ANSWER, {"ExitCode": 137}, False),  # Docker ended what did not stop in time
        (LIFE + ANSWER, {**RUNS, "restarts": 0}, False),
        (LIFE + ANSWER, {"ExitCode": 0}, False),
    ],
)
def test_what_a_crash_left_is_kept_before_its_container_goes(
    tmp_path: Path, log: str, state: dict[str, Any], kept: bool
) -> None:
    """Once for each death, with nothing of its later life, which may be long."""
    gone, folder = container(log, **state), tmp_path / "serve/r/base-1"
    short = crash_facts.keep_evidence(gone, folder, "r", "sparkpin/r:base-1")
    assert folder.exists() == kept == bool(short)
    if kept:
        assert (folder / crash_facts.LOG).read_text().strip() == log.removesuffix(LIFE).strip()
        assert "/dev/shm" in short and str(folder / crash_facts.REPORT) in short and "\n" not in short
        (folder / crash_facts.REPORT).write_text("as it was written then")
        assert "as it was written then" in crash_facts.keep_evidence(gone, folder, "r", "sparkpin/r:base-1")


@pytest.mark.parametrize("health", ["healthy", "unhealthy", "starting", "unknown"])
def test_only_a_server_that_is_known_to_be_healthy_is_stopped_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, health: str
) -> None:
    """Of one that died before, and that Docker has started again."""
    monkeypatch.setattr(linked.launch, "remove", lambda _: None)
    there, said = container(LIFE + INIT + LIFE, **RUNS, health=health), heard()
    part = Part(Machine(HERE, cast(Engine, None)), there)
    linked.remove(Paths(tmp_path, tmp_path, tmp_path), "r", [part])
    (line,) = said
    assert "/dev/shm" in line and ("stopped while healthy" in line) == (health == "healthy")
