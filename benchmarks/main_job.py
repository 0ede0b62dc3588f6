"""How long a person waits for the main job's tasks: medians beside what was promised, and a peer where there is one.

usage: .venv/bin/python benchmarks/main_job.py [--runs 5]

Run it after ./install.sh, on a machine that does nothing else. It works in a copy of the checkout with its own home,
and its tags are removed at the end. The cold install is not timed here: the log of CI has it.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(PROJECT / "tests/support"))

from checkout import INVOKE, Checkout  # noqa: E402

from sparkpin.core import terminal  # noqa: E402


def timed(act: Callable[[], object]) -> float:
    begin = time.monotonic()
    act()
    return time.monotonic() - begin


def run(*argv: str, cwd: Path = PROJECT) -> None:
    subprocess.run(argv, cwd=cwd, check=True, capture_output=True)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--runs", type=int, default=5)
    runs = options.parse_args().runs
    rows: list[tuple[str, str, str, str]] = []

    def measure(what: str, promised: float, act: Callable[[], object], count: int = runs, peer: str = "") -> None:
        times = [timed(act) for _ in range(count)]
        rows.append((what, f"{statistics.median(times):.2f} s", f"{promised:g} s", peer))
        terminal.say(f"{what}: {', '.join(f'{value:.2f}' for value in times)}")

    measure("invoke --list", 0.5, lambda: run(*INVOKE, "--list"))
    measure("./install.sh, nothing to do", 30, lambda: run("./install.sh"))
    measure("invoke build --stage v2-tq, nothing to do", 1.5, lambda: run(*INVOKE, "build", "--stage", "v2-tq"))
    with tempfile.TemporaryDirectory() as folder:
        copy = Checkout.make(Path(folder) / "copy")
        copy.add_recipe("bench", **{"stage: v2-tq": "stage: base"})
        try:
            for length in ("2048", "1024"):
                copy.replace("recipes/bench.yaml", "max_model_len: 2048", f"max_model_len: {length}")
                copy.done("build", "--recipe", "bench")
                measure("one image's smoke test", 45, lambda: copy.done("smoke", "--recipe", "bench"), 1)
                copy.done("promote", copy.release(recipe="bench")["tag"])
            newest = copy.release(recipe="bench")["tag"]
            back = []
            for _ in range(runs):
                back.append(timed(lambda: copy.done("rollback", "--recipe", "bench")))
                copy.done("promote", newest)
            tag = statistics.median(
                timed(lambda: run("docker", "tag", newest, "sparkpin/bench:peer")) for _ in range(runs)
            )
            median = statistics.median(back)
            rows.append(("invoke rollback", f"{median:.2f} s", "1 s", f"{median / tag:.1f} x `docker tag`"))
            copy.replace("recipes/bench.yaml", "stage: base", "stage: v2-tq")
            copy.done("build", "--recipe", "bench")
            init = copy.folder / "mods/turboquant/sparkpin_turboquant/__init__.py"

            def change() -> None:
                init.write_text(f"{init.read_text()}\n# {time.time_ns()}\n")
                copy.done("build", "--recipe", "bench")

            measure("one line of a mod to a loaded, tagged image", 30, change, min(runs, 3))
        finally:
            copy.remove_tags("bench")
    terminal.show(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}")
    terminal.table(("what", "median", "promised", "peer"), rows)


if __name__ == "__main__":
    main()
