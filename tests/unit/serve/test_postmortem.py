"""Why a server ended, from logs as vLLM writes them."""

from __future__ import annotations

import pytest

from sparkpin.serve import crash_facts
from sparkpin.serve.postmortem import Death, first_error, report

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
            "ValueError: To serve at least one request with the models's max seq len (262144), (12.0 GiB KV cache is "
            "needed, which is larger than the available KV cache memory (8.0 GiB).",
            "does not hold one request",
        ),
        ("OSError: [Errno 28] No space left on device", "is full"),
        ("sparkpin: ended: the kernel killed 1 of its processes for want of memory", "passed its memory limit"),
        ("sparkpin: ended: it answered no request any more", "it hung"),
        ("sparkpin: rank 1 was silent for 10 s: ending this node, too", "another node of it ended"),
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


def test_what_the_kernel_said_since_the_start() -> None:
    text = (
        "[   10.000000] Memory cgroup out of memory: Killed process 7 (old)\n"
        "[  100.500000] NVRM: Xid (PCI:0000:01:00): 31, pid=8, name=VLLM\n[  101.0] eth0: up\n"
    )
    lines = crash_facts.kernel_lines(text, "1970-01-01T00:01:00.123456789Z", boot=0.0)
    assert lines == ["kernel: NVRM: Xid (PCI:0000:01:00): 31, pid=8, name=VLLM"]
    assert crash_facts.kernel_lines(text, "", boot=0.0) == []
