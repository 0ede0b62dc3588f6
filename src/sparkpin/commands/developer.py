"""For who changes sparkpin: the tests and the checks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from sparkpin.core.errors import InputError

PYTHON = [sys.executable, "-m"]
PYTEST = [*PYTHON, "pytest", "-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder", "--durations", "15"]
SERVERS = ["--maxprocesses", "4"]  # each may run a server of 3 GB
GOLDEN = "tests/e2e/test_golden.py"


def test(project: Path, *, fast: bool = False, whole: bool = False, rest: bool = False, select: str = "") -> int:
    """Run a part of the tests, by default the unit tests and the golden run; gives pytest's exit code.

    fast: the unit tests alone; rest: what the default leaves out; select: pytest's -k expression, over that part.
    Raises InputError where more than one part is asked for.
    """
    if fast + whole + rest > 1:
        raise InputError("--fast, --all and --rest exclude each other", next_step="invoke test --all runs every test")
    part = ["tests"] if whole else ["tests/unit", GOLDEN]
    if rest:
        part = ["tests/engine", "tests/e2e", "tests/adversary", f"--ignore={GOLDEN}", "--durations", "40"]
    part = ["tests/unit"] if fast else [*SERVERS, *part]
    return run_all(project, [*PYTEST, *part, *(["-k", select] if select else [])])


def check(project: Path) -> int:
    """Run ruff, mypy, shellcheck and hadolint; returns the exit code of the first that found something."""
    return run_all(
        project,
        [*PYTHON, "ruff", "check", "."],
        [*PYTHON, "ruff", "format", "--check", "."],
        [*PYTHON, "mypy"],
        [str(Path(sys.executable).with_name("shellcheck")), *scripts(project)],
        [*PYTHON, "sparkpin.commands.lint", "."],
    )


def scripts(project: Path) -> list[str]:
    """Every shell script that this machine or an image runs."""
    found = [path for top in ("src", "mods") for path in sorted((project / top).rglob("*.sh"))]
    return ["install.sh", ".ci/run", *(str(path.relative_to(project)) for path in found)]


def run_all(project: Path, *commands: list[str]) -> int:
    """Run each in the project; returns the first exit code that is not 0, after all have run."""
    codes = [subprocess.run(command, cwd=project).returncode for command in commands]
    return next((code for code in codes if code), 0)
