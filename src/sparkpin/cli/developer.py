"""For who changes sparkpin: the tests and the checks."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from sparkpin.cli.tasks import task
from sparkpin.core.errors import InputError
from sparkpin.core.paths import project_folder

PYTHON = [sys.executable, "-m"]
PYTEST = [*PYTHON, "pytest", "-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder", "--durations", "15"]
UNIT = ["tests/unit"]
REAL = ["--maxprocesses", "4", "tests/engine", "tests/e2e", "tests/adversary"]  # each may run a server of 3 GB
NOTHING_SELECTED = 5  # pytest's exit code


@task("for developers")
def test(
    *,
    fast: Annotated[bool, "only the unit tests: no engine, no images"] = False,
    all: Annotated[bool, "every test, the slow ones too"] = False,
    select: Annotated[str, "pytest's -k expression", "EXPRESSION"] = "",
) -> int:
    """Run the tests; the slow ones only with --all."""
    if fast and all:
        raise InputError("--fast and --all exclude each other", next_step="invoke test --all runs every test")
    chosen = ["-k", select] if select else []
    parts = {"unit tests": [*PYTEST, *UNIT, *chosen]}
    if not fast:
        parts["tests with engine and servers"] = [*PYTEST, *REAL, *([] if all else ["-m", "not slow"]), *chosen]
    codes = run_all(parts)
    if select and set(codes) > {NOTHING_SELECTED}:
        codes = [code for code in codes if code != NOTHING_SELECTED]
    return next(filter(None, codes), 0)


@task("for developers")
def check() -> int:
    """Run ruff, mypy, shellcheck and hadolint."""
    scripts = [path for top in ("src", "mods") for path in sorted((project_folder() / top).rglob("*.sh"))]
    commands: dict[str, list[str | Path]] = {
        "ruff check": [*PYTHON, "ruff", "check", "."],
        "ruff format": [*PYTHON, "ruff", "format", "--check", "."],
        "mypy": [*PYTHON, "mypy"],
        "shellcheck": [Path(sys.executable).with_name("shellcheck"), "install.sh", ".ci/run", *scripts],
        "hadolint and secrets": [*PYTHON, "sparkpin.cli.lint", "."],
    }
    return next(filter(None, run_all(commands)), 0)


def run_all(commands: Mapping[str, Sequence[str | Path]]) -> list[int]:
    """Run each in the project, though one before it failed, and print how long each took; returns the exit codes."""
    codes, seconds = [], {}
    for name, command in commands.items():
        begin = time.monotonic()
        codes.append(subprocess.run(command, cwd=project_folder()).returncode)
        seconds[name] = time.monotonic() - begin
    for name, took in seconds.items():
        print(f"{took:7.1f} s {name}", flush=True)
    return codes
