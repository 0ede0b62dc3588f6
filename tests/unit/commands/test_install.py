"""install.sh: its options and its dry run. tests/e2e/commands has what it does on a fresh Debian 12."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from checkout import INVOKE, PROJECT, Checkout


def install(*options: str, checkout: Checkout | None = None) -> subprocess.CompletedProcess[str]:
    folder, env = (checkout.folder, checkout.env) if checkout else (PROJECT, None)
    return subprocess.run(["./install.sh", *options], cwd=folder, env=env, capture_output=True, text=True, timeout=600)


def test_help_names_every_option() -> None:
    result = install("--help")
    assert result.returncode == 0
    for option in ("--stack", "--recipe", "--stage", "--no-smoke", "--dry-run", "--help"):
        assert option in result.stdout


@pytest.mark.parametrize("options", [["--stgae", "v2"], ["--stage"], ["v2"]])
def test_a_wrong_option_stops_it_before_anything_else(options: list[str]) -> None:
    result = install(*options)
    assert result.returncode == 2
    assert "--help" in result.stderr
    assert result.stdout == ""


def test_an_unknown_stage_is_told_by_a_dry_run() -> None:
    result = install("--dry-run", "--stage", "v3")
    assert result.returncode == 2
    assert "unknown stage 'v3'" in result.stderr


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
    assert "Stack cpu" in result.stdout
    assert "Recipe scripted-tiny" in result.stdout
    assert "hybrid" in result.stdout
    assert "v2-tq" not in result.stdout
    assert "nothing was changed" in result.stdout


def test_a_dry_run_without_a_venv_ends_with_what_it_would_do(copy: Checkout) -> None:
    for options in ([], ["--stage", "mtp"]):
        done = install("--dry-run", *options, checkout=copy)
        wanted = " ".join(["would make .venv from requirements.lock, then run: invoke up", *options])
        assert (done.returncode, done.stdout.splitlines()[-1]) == (0, wanted), done.stderr
    assert not (copy.folder / ".venv").exists()


def test_the_long_silence_of_pip_is_broken() -> None:
    """With lines as pip writes them."""
    text = (PROJECT / "install.sh").read_text()
    function = text[text.index("steps_of_pip() {") :].partition("\n}\n")[0] + "\n}\n"
    said = [
        f"Collecting x{number}==1 (from -r requirements.lock (line 1))\n  Downloading x.whl" for number in range(45)
    ]
    said += ["WARNING: Location 'x' is ignored", "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES"]
    lines = "\n".join([*said, "Installing collected packages: x0, x1", "Successfully installed x0-1", ""])
    done = subprocess.run(["bash", "-euc", f"{function}steps_of_pip"], input=lines, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES\n")
    assert done.stdout.splitlines() == [
        "  20 packages looked up",
        "  40 packages looked up",
        "  all 45 are here; installing them",
    ]
