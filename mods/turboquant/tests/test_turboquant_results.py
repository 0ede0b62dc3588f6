"""The README's numbers are those of benchmarks/h200.json; what report.py makes of results, and session.py of files."""

from __future__ import annotations

import importlib.util
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from sparkpin_turboquant.tuned import tuned_for

MOD = Path(__file__).parents[1]
README = (MOD / "README.md").read_text(encoding="utf-8").splitlines()
ROWS = json.loads((MOD / "benchmarks/h200.json").read_text(encoding="utf-8"))


def script(name: str) -> ModuleType:
    """By path: other mods' benchmarks have such names, too."""
    spec = importlib.util.spec_from_file_location(f"turboquant_{name}", MOD / f"benchmarks/{name}.py")
    assert spec and spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


report = script("report")


def test_the_readme_s_speeds_are_the_results() -> None:
    lines = report.speeds(ROWS).splitlines()[2:]
    assert len(lines) == 12 and set(lines) <= set(README)


def test_the_readme_s_prefill_is_the_results() -> None:
    """By the way that tuned.json, which these results made, chooses."""
    lines = report.prefill(ROWS).splitlines()
    assert len(lines) == 2 + 9 and "\n".join(lines) in "\n".join(README)
    [tuned] = tuned_for(90)
    assert report.tuned() == (tuned.few, tuned.joined)


def test_the_readme_s_way_is_not_always_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [sized(8192, 8, few_us=50, room_16384_us=40, joined_us=30), sized(8192, 64, few_us=50, room_16384_us=40)]
    monkeypatch.setattr(report, "tuned", lambda: (8, 32))
    assert report.prefill(rows).splitlines()[2:] == ["| 8 | 50 / 100 / 90 | 2.00 |", "| 64 | 40 / 100 / 90 | 2.50 |"]
    monkeypatch.setattr(report, "tuned", lambda: (4, 64))
    assert report.prefill(rows).splitlines()[2:] == ["| 8 | 30 / 100 / 90 | 3.33 |", "| 64 |  |  |"]


def test_other_numbers_of_the_readme() -> None:
    text, others = " ".join(README), report.others(ROWS).splitlines()
    assert "892, 674, 548 GB/s" in text and "with few multiprocessors 892, 674, 548 GB/s" in others
    for name, short in (("k8v4", "k8v4"), ("4bit_nc", "4bit"), ("k3v4_nc", "k3v4"), ("3bit_nc", "3bit")):
        [line] = [line for line in others if line.startswith(f"turboquant_{name} ")]
        assert f"{short} {line.partition(' ')[2]}" in text


def test_tuned_is_what_the_results_advise() -> None:
    [tuned] = tuned_for(90)
    assert report.advice(ROWS).startswith(f'for tuned.json: "few": {tuned.few}, "joined": {tuned.joined}: ')


def sized(history: int, new: int, **times: float) -> dict[str, Any]:
    return {"history": history, "new": new, "paged_us": 100.0, "bf16_us": 90.0, **times}


def test_advice_is_what_takes_the_least() -> None:
    rows = [
        sized(8192, 16, few_us=110, room_16384_us=180, joined_us=120),
        sized(8192, 64, few_us=300, room_16384_us=150, joined_us=125),
        sized(8192, 512, room_16384_us=100, joined_us=101, room_4096_us=7),
    ]
    assert report.advice(rows).startswith('for tuned.json: "few": 16, "joined": 64: ')
    assert [line.split(" | ")[-2:] for line in report.side_by_side(rows).splitlines()[2:]] == [
        ["0.91", "few |"],
        ["0.80", "joined |"],
        ["1.00", "parts |"],
    ]
    for row in rows:
        row.pop("joined_us")
    assert '"joined": 0' in report.advice(rows)
    assert report.advice([]) == "no prefill was measured"


def test_a_session_s_results_are_rows_of_speeds_and_worst_errors(tmp_path: Path) -> None:
    session = script("session")
    (tmp_path / "run-bench.json").write_text('[{"read": 4578.0}]')
    (tmp_path / "prefill-check.json").write_text('[{"error": 0.001}, {"error": 0.003}]')
    for step in session.STEPS[1:]:
        assert step.command[-1].format(out=tmp_path) == str(session.measured(step, tmp_path))
    found = session.results(tmp_path, session.STEPS)
    assert found == [{"check": "prefill-check", "cases": 2, "worst": 0.003}, {"read": 4578.0}]
    assert report.others(found).splitlines() == [
        "read 4578 GB/s",
        "prefill-check: worst error of 2 cases 0.0030",
    ]


def called(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(MOD / "benchmarks" / words[0]), *words[1:]]
    return subprocess.run(command, cwd=MOD / "benchmarks", capture_output=True, text=True)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["report.py"], "the following arguments are required: RESULTS.json"),
        (["report.py", "none.json"], "none.json: [Errno 2] No such file or directory"),
        (["report.py", "report.py"], "wanted results, such as h200.json"),
        (["plot.py", "h200.json"], "the following arguments are required: OUT.svg"),
        (["plot.py", "none.json", "x.svg"], "none.json: [Errno 2] No such file or directory"),
        (["session.py", "none"], "--peers is not given: wanted the folder that peers.py made"),
        (["session.py", "none", "--peers", "here"], "--peers here: wanted the folder that peers.py made"),
    ],
)
def test_a_script_says_what_it_wants(command: list[str], said: str) -> None:
    ended = called(*command)
    assert ended.returncode == 2 and said in ended.stderr and "Traceback" not in ended.stderr


def test_a_dry_run_s_commands_can_be_pasted(tmp_path: Path) -> None:
    session, out = script("session"), tmp_path / "a folder"
    ended = called("session.py", str(out), "--dry-run", "--steps", "run-check", "tests")
    assert ended.returncode == 0
    seen = [shlex.split(line, comments=True) for line in ended.stdout.splitlines()]
    made, exported, tests, check = (words for words in seen if words)
    assert made == ["mkdir", "-p", str(out)] and exported[0] == "export"
    steps = {step.name: step for step in session.STEPS}
    assert tests == steps["tests"].words(out) and str(out / "run-check.json") in check
    assert check == [f"CHECKED={steps['run-check'].environment['CHECKED']}", *steps["run-check"].words(out)]
    assert not out.exists()


@pytest.mark.parametrize(("code", "said"), [("0", ""), ("3", "exit status 3")])
def test_a_step_says_how_it_ended(tmp_path: Path, code: str, said: str) -> None:
    session = script("session")
    step = session.Step("sample", ("sh", "-c", f"echo {{out}}; exit {code}"), 1, 60)
    assert session.run(step, tmp_path, {"PATH": "/bin:/usr/bin"}, 60) == said
    assert (tmp_path / "sample.log").read_text() == f"{tmp_path}\n"


def test_a_step_that_takes_too_long_is_stopped_with_what_it_started(tmp_path: Path) -> None:
    session = script("session")
    step = session.Step("sample", ("sh", "-c", "sleep 600 & echo $!; wait"), 1, 60)
    assert session.run(step, tmp_path, {"PATH": "/bin:/usr/bin"}, 5) == "stopped after 5 s"
    child = int((tmp_path / "sample.log").read_text())
    until = time.monotonic() + 60
    while is_running(child):  # on a busy machine it dies some time after it was killed
        assert time.monotonic() < until
        time.sleep(0.01)


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().split()[2]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # nobody waits for it where init does not
