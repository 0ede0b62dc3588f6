"""install.sh: its options and its dry run. tests/e2e/cli has what it does on a fresh Debian 12."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from checkout import INVOKE, PROJECT, Checkout


def install(*options: str, checkout: Checkout | None = None) -> subprocess.CompletedProcess[str]:
    folder, env = (checkout.folder, checkout.env) if checkout else (PROJECT, None)
    return subprocess.run(["./install.sh", *options], cwd=folder, env=env, capture_output=True, text=True, timeout=600)


def test_help_has_each_option() -> None:
    done = install("--help")
    options = ("--stack", "--recipe", "--stage", "--no-smoke", "--serve", "--yes", "--dry-run")
    assert done.returncode == 0 and all(option in done.stdout for option in options)


@pytest.mark.parametrize("options", [["--stgae", "v2"], ["--stage"], ["v2"], ["--dry-run", "--stage", "v9"]])
def test_wrong_options_are_refused(options: list[str]) -> None:
    done = install(*options)
    assert done.returncode == 2 and done.stderr


@pytest.fixture
def copy(tmp_path: Path) -> Checkout:
    """Whether this checkout has been installed is nothing to these tests."""
    return Checkout.clone(tmp_path / "copy")


def test_a_dry_run_says_what_would_be_done(copy: Checkout) -> None:
    """In an installed checkout, whose stamp is as install.sh writes it."""
    (copy.folder / ".venv/bin").mkdir(parents=True)
    (copy.folder / ".venv/bin/invoke").symlink_to(INVOKE[0])
    stamp = "(pwd && sha256sum requirements.lock pyproject.toml) >.venv/.requirements.sha256"
    subprocess.run(["bash", "-c", stamp], cwd=copy.folder, check=True)
    result = install("--dry-run", "--stage", "mtp", checkout=copy)
    assert result.returncode == 0, result.stderr
    assert all(word in result.stdout for word in ("Stack cpu", "Recipe scripted-tiny", "hybrid", "nothing was changed"))
    assert "v2-tq" not in result.stdout


def test_a_dry_run_without_a_venv_ends_with_what_it_would_do(copy: Checkout) -> None:
    for options in ([], ["--stage", "mtp"], ["--serve", "--yes"]):
        done = install("--dry-run", *options, checkout=copy)
        wanted = " ".join(["would make .venv from requirements.lock, then run: invoke up", *options])
        assert (done.returncode, done.stdout.splitlines()[-1]) == (0, wanted), done.stderr
    assert not (copy.folder / ".venv").exists()
