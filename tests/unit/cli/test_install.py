"""install.sh: its options and its dry run. tests/e2e/cli has what it does on a fresh Debian 12."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from checkout import INVOKE, Checkout

from sparkpin.cli.line import TaskParser


def install(*options: str, checkout: Checkout) -> subprocess.CompletedProcess[str]:
    line, folder = ["./install.sh", *options], checkout.folder
    return subprocess.run(line, cwd=folder, env=checkout.env, capture_output=True, text=True, timeout=600)


@pytest.fixture
def copy(tmp_path: Path) -> Checkout:
    """Whether this checkout has been installed is nothing to these tests."""
    return Checkout.clone(tmp_path / "copy")


def test_an_installed_checkout_hands_its_options_to_up(copy: Checkout) -> None:
    """Its stamp is as install.sh writes it."""
    (copy.folder / ".venv/bin").mkdir(parents=True)
    (copy.folder / ".venv/bin/invoke").symlink_to(INVOKE[0])
    stamp = "(pwd && sha256sum requirements.lock pyproject.toml) >.venv/.requirements.sha256"
    subprocess.run(["bash", "-c", stamp], cwd=copy.folder, check=True)
    result = install("--dry-run", "--stage", "mtp", checkout=copy)
    assert result.returncode == 0, result.stderr
    assert all(word in result.stdout for word in ("Stack cpu", "Recipe scripted-tiny", "hybrid"))
    assert "v2-tq" not in result.stdout


def test_without_a_venv_help_a_dry_run_and_a_wrong_option_change_nothing(copy: Checkout) -> None:
    assert "invoke up" in install("--help", checkout=copy).stdout
    arguments = TaskParser("invoke", "up").arguments
    known = [one.option_strings[-1] + ("" if one.nargs == 0 else "=x") for one in arguments]
    for options in (["--dry-run"], ["--stage", "mtp", "--dry-run"], [*known, "-q", "--verbose"]):
        done = install(*options, checkout=copy)
        assert (done.returncode, done.stderr) == (0, "") and " ".join(["invoke up", *options]) in done.stdout
    wrong = install("--stgae", "v2", checkout=copy)
    assert (wrong.returncode, wrong.stdout) == (2, "") and "--stgae" in wrong.stderr
    assert not (copy.folder / ".venv").exists()
