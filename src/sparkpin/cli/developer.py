"""For who changes sparkpin: the tests and the checks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from sparkpin.cli import lint
from sparkpin.cli.tasks import task
from sparkpin.core.errors import InputError
from sparkpin.core.paths import project_folder

PYTHON = [sys.executable, "-m"]
PYTEST = [*PYTHON, "pytest", "-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder", "--durations", "15"]
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
    parts = [["tests/unit"], *([] if fast else [[*REAL, *([] if all else ["-m", "not slow"])]])]
    codes = run_all([[*PYTEST, *part, *(["-k", select] if select else [])] for part in parts])
    if select and {*codes} > {NOTHING_SELECTED}:
        codes = [code for code in codes if code != NOTHING_SELECTED]
    return max(codes)


@task("for developers")
def check() -> int:
    """Run ruff, mypy, shellcheck and hadolint."""
    project = project_folder()
    scripts = [path for top in ("src", "mods") for path in sorted((project / top).rglob("*.sh"))]
    commands: list[list[str | Path]] = [
        [*PYTHON, "ruff", "check", "."],
        [*PYTHON, "ruff", "format", "--check", "."],
        [*PYTHON, "mypy"],
        [Path(sys.executable).with_name("shellcheck"), "install.sh", ".ci/run", *scripts],
    ]
    return max(*run_all(commands), lint.lint(project))


def run_all(commands: Sequence[Sequence[str | Path]]) -> list[int]:
    """Run each in the project, though one before it failed; returns the exit codes."""
    return [subprocess.run(command, cwd=project_folder()).returncode for command in commands]
