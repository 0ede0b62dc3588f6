"""For who changes sparkpin: the tests and the checks."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from sparkpin.core.errors import InputError

PYTHON = [sys.executable, "-m"]
PYTEST = [*PYTHON, "pytest", "-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder", "--durations", "15"]
UNIT = ["tests/unit"]
REAL = ["--maxprocesses", "4", "tests/engine", "tests/e2e", "tests/adversary"]  # each may run a server of 3 GB
NOTHING_SELECTED = 5  # pytest's exit code


def test(project: Path, *, fast: bool = False, whole: bool = False, select: str = "") -> int:
    """Run a part of the tests, by default all except those marked slow; gives pytest's exit code.

    fast: the unit tests alone; whole: the slow ones, too; select: pytest's -k expression, over that part.
    """
    if fast and whole:
        raise InputError("--fast and --all exclude each other", next_step="invoke test --all runs every test")
    chosen = ["-k", select] if select else []
    parts = {"unit tests": [*PYTEST, *UNIT, *chosen]}
    if not fast:
        parts["tests with engine and servers"] = [*PYTEST, *REAL, *([] if whole else ["-m", "not slow"]), *chosen]
    codes = run_all(project, parts)
    if select and set(codes) > {NOTHING_SELECTED}:
        codes = [code for code in codes if code != NOTHING_SELECTED]
    return first_failure(codes)


def check(project: Path) -> int:
    """Run ruff, mypy, shellcheck and hadolint; returns the exit code of the first that found something."""
    return first_failure(
        run_all(
            project,
            {
                "ruff check": [*PYTHON, "ruff", "check", "."],
                "ruff format": [*PYTHON, "ruff", "format", "--check", "."],
                "mypy": [*PYTHON, "mypy"],
                "shellcheck": [str(Path(sys.executable).with_name("shellcheck")), *scripts(project)],
                "hadolint and secrets": [*PYTHON, "sparkpin.cli.lint", "."],
            },
        )
    )


def scripts(project: Path) -> list[str]:
    """Every shell script that this machine or an image runs."""
    found = [path for top in ("src", "mods") for path in sorted((project / top).rglob("*.sh"))]
    return ["install.sh", ".ci/run", *(str(path.relative_to(project)) for path in found)]


def run_all(project: Path, commands: dict[str, list[str]]) -> list[int]:
    """Run each in the project, though one before it failed, and print how long each took; returns the exit codes."""
    codes, seconds = [], {}
    for name, command in commands.items():
        begin = time.monotonic()
        codes.append(subprocess.run(command, cwd=project).returncode)
        seconds[name] = time.monotonic() - begin
    for name, took in seconds.items():
        print(f"{took:7.1f} s {name}", flush=True)
    return codes


def first_failure(codes: list[int]) -> int:
    return next((code for code in codes if code), 0)
