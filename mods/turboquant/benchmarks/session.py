"""One run on a GPU that brings all this README's tables up to date: tests, checks, speeds. Six minutes at most.

Here, on a machine with a network, what to take along: FlashAttention 3 for Hopper and vLLM's own kernels, 165 MB that
`tar cJ` makes 15 of:

    grep ^vllm== benchmarks/stage_table/requires.txt >VLLM    # with its hash
    pip download --require-hashes --no-deps --only-binary :all: --platform manylinux_2_28_x86_64 -r VLLM
    python mods/turboquant/benchmarks/peers.py vllm-0.33.0-*.whl PEERS

There, on an H200 (the tables are of one), with PyTorch for CUDA 13, its Triton, cuda-bindings and pytest, from the
project's folder:

    python mods/turboquant/benchmarks/session.py OUT --peers PEERS

Here again: look at OUT/report.txt, where an error is a line with "worst"; then

    cp OUT/results.json mods/turboquant/benchmarks/h200.json    # only if all steps were done
    cd mods/turboquant/benchmarks
    python report.py h200.json            # the README's tables, the ways of prefill, and what tuned.json should say
    python plot.py h200.json speed.svg    # needs matplotlib

Steps run one after another, the most wanted first, each in a process of its own with a limit. One that fails does not
stop the next; one for which no time is left is named. What a step measured before it was stopped is in its log only.
--dry-run prints each step's command, to be pasted, and its limits. The exit status is 1 if anything failed or was left
out; `--steps NAME ...` with the same OUT runs those steps later, and the results are of all.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
MOD = HERE.parent


@dataclass(frozen=True)
class Step:
    """least, most: seconds without which it is not begun and after which it is ended. results: for h200.json."""

    name: str
    command: tuple[str, ...]
    least: int
    most: int
    results: bool = False
    environment: dict[str, str] = field(default_factory=dict)

    def words(self, out: Path) -> list[str]:
        return [word.format(out=out) for word in self.command]


def benchmark(script: str, what: str) -> tuple[str, ...]:
    return (sys.executable, str(HERE / script), what, f"{{out}}/{script.removesuffix('.py')}-{what}.json")


TESTS = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(MOD.parent))
STEPS = (
    Step("tests", (*TESTS, "--confcutdir", str(MOD.parent), str(MOD / "tests/on_gpu")), 20, 90),
    Step("prefill-check", benchmark("prefill.py", "check"), 20, 90),
    Step("prefill-speed", benchmark("prefill.py", "speed"), 30, 120, results=True),
    Step("run-bench", benchmark("run.py", "bench"), 45, 150, results=True),
    Step("prefill-stock", benchmark("prefill.py", "stock"), 20, 60, results=True),
    # Lengths beside each boundary of a block, and one long; all of them with CHECKED unset, on a day with more time.
    Step("run-check", benchmark("run.py", "check"), 30, 120, environment={"CHECKED": "1 127 128 129 4608 4609 131072"}),
)


def run(step: Step, out: Path, environment: dict[str, str], seconds: float) -> str:
    """Runs it; its output goes to ``OUT/NAME.log``. Says how it ended; "" is well."""
    command, limit = step.words(out), min(step.most, seconds)
    with (out / f"{step.name}.log").open("w") as log:
        process = subprocess.Popen(
            command, env=environment | step.environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            return f"stopped after {limit:.0f} s"
        finally:
            if process.poll() is None:  # too long, or somebody's Ctrl-C: with what it started to compile
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return f"exit status {status}" if status else ""


def machine() -> dict[str, object]:
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return {"gpu": name, "torch": torch.__version__, "cuda": torch.version.cuda}


def measured(step: Step, out: Path) -> Path:
    """Where a benchmark puts its rows. The tests have none."""
    return out / f"{step.name}.json"


def results(out: Path, steps: tuple[Step, ...]) -> list[dict[str, object]]:
    """Rows of the steps that got to their end; of a check the worst error."""
    rows: list[dict[str, object]] = []
    for step in steps:
        file = measured(step, out)
        found = json.loads(file.read_text()) if file.is_file() else []
        if step.results:
            rows += found
        elif found:
            errors = [row["error"] for row in found]
            rows.append({"check": step.name, "cases": len(errors), "worst": max(errors)})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="a folder for logs and results")
    parser.add_argument("--peers", type=Path, help="what peers.py made")
    parser.add_argument("--seconds", type=int, default=350, help="for all steps")
    parser.add_argument("--steps", nargs="+", choices=[step.name for step in STEPS], help="only these")
    parser.add_argument("--dry-run", action="store_true", help="print the steps' commands, run nothing")
    given = parser.parse_args()
    peers = [] if given.peers is None else [given.peers.resolve()]
    path = [MOD, MOD.parent / "modkit", *peers, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path)), "PYTHONUNBUFFERED": "1"}
    steps = [step for step in STEPS if given.steps is None or step.name in given.steps]
    if given.dry_run:
        if given.peers is None:
            print("# without --peers: the benchmarks need what peers.py made on PYTHONPATH, too")
        print(f"mkdir -p {shlex.quote(str(given.out))}")
        print(f"export PYTHONPATH={shlex.quote(environment['PYTHONPATH'])} PYTHONUNBUFFERED=1")
        for step in steps:
            print(f"# {step.name}: not begun with less than {step.least} s left, ended after {step.most} s")
            said = [f"{key}={shlex.quote(value)}" for key, value in step.environment.items()]
            print(*said, shlex.join(step.words(given.out)))
        return 0
    if not (peers and (peers[0] / "vllm/vllm_flash_attn").is_dir()):
        seen = "is not given" if given.peers is None else given.peers
        parser.error(f"--peers {seen}: wanted the folder that peers.py made, with vllm/vllm_flash_attn in it")
    if (here := machine())["gpu"] == "no GPU":
        parser.error("torch sees no GPU")
    if old := [file for step in steps if (file := measured(step, given.out)).is_file()]:
        parser.error(f"{old[0]} was measured before; wanted another folder, or --steps that this one lacks")
    given.out.mkdir(parents=True, exist_ok=True)
    began, lines, failed = time.monotonic(), [str(here)], False
    for step in steps:
        left = given.seconds - (time.monotonic() - began)
        start = time.monotonic()
        ended = f"left out, {left:.0f} s were left" if left < step.least else run(step, given.out, environment, left)
        failed |= bool(ended)
        lines.append(f"{step.name}: {ended or 'done'}, {time.monotonic() - start:.0f} s")
        print(lines[-1], flush=True)
        log = given.out / f"{step.name}.log"
        tail = log.read_text(errors="replace").splitlines() if log.is_file() else []
        lines += [f"  {line}" for line in (tail[-15:] if ended else [x for x in tail if "worst" in x or "passed" in x])]
    (given.out / "results.json").write_text(json.dumps(results(given.out, STEPS), indent=1))
    table = [sys.executable, str(HERE / "report.py"), str(given.out / "results.json")]
    lines.append(subprocess.run(table, capture_output=True, text=True).stdout)
    (given.out / "report.txt").write_text("\n".join(lines))
    print("\n".join(lines))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
