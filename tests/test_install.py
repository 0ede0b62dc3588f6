"""install.sh: its options, and what it does on a fresh Debian 12: a container of the stack's own root file system."""

from __future__ import annotations

import subprocess

import pytest

from checkout import PROJECT
from sparkpin import manifests, render, rootfs
from sparkpin.engine import Engine


def install(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["./install.sh", *options], cwd=PROJECT, capture_output=True, text=True, timeout=120)


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


def test_a_dry_run_says_what_would_be_done() -> None:
    result = install("--dry-run", "--stage", "mtp")
    assert result.returncode == 0
    assert "Stack cpu" in result.stdout
    assert "Recipe scripted-tiny" in result.stdout
    assert "hybrid" in result.stdout
    assert "v2-tq" not in result.stdout
    assert "nothing was changed" in result.stdout


def on_fresh_debian(command: list[str], user: str) -> tuple[int, str]:
    """Run in a container of the bare root file system; the checkout is mounted read-only."""
    stack = manifests.load_stack(PROJECT, "cpu")
    lock = manifests.load_stack_lock(PROJECT, stack)
    container = Engine.connect().client.containers.create(
        render.rootfs_ref(stack.debian.suite, rootfs.rootfs_spec(stack, lock).key),
        command,
        user=user,
        working_dir="/src",
        environment={"HOME": "/tmp"},
        volumes={str(PROJECT): {"bind": "/src", "mode": "ro"}},
        tmpfs={"/src/.venv": "ro"},  # a fresh clone has none
        network_mode="none",
    )
    try:
        container.start()
        code = container.wait(timeout=120)["StatusCode"]
        return code, container.logs().decode(errors="replace")
    finally:
        container.remove(force=True)


@pytest.mark.e2e
@pytest.mark.parametrize("options", [[], ["--no-smoke"]])
def test_without_root_it_prints_the_commands_and_exits_with_3(options: list[str]) -> None:
    code, text = on_fresh_debian(["bash", "./install.sh", *options], "10001:10001")
    assert code == 3, text
    command = next(line for line in text.splitlines() if "apt-get" in line and "install" in line)
    for package in ("docker.io", "iptables", "mmdebstrap", "debian-archive-keyring", "python3-venv"):
        assert package in command
    assert "Nothing was changed" in text
    assert "Traceback" not in text


@pytest.mark.e2e
def test_a_dry_run_as_root_says_what_it_would_install() -> None:
    code, text = on_fresh_debian(["bash", "./install.sh", "--dry-run"], "0:0")
    assert code == 0, text
    assert "apt-get" in text
    assert "docker.io" in text
    assert "would make .venv" in text
