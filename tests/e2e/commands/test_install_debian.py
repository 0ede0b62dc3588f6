"""install.sh on a fresh Debian 12: a container of the stack's own root file system."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from checkout import Checkout
from in_container import run
from places import PROJECT

from sparkpin.build import rootfs
from sparkpin.core import tags
from sparkpin.host.engine import Engine
from sparkpin.pins import manifests


def on_fresh_debian(folder: Path, command: list[str], user: str) -> tuple[int, str]:
    """Run in a container of the bare root file system; a fresh clone is mounted read-only."""
    stack = manifests.load_stack(PROJECT, "cpu")
    lock = manifests.load_stack_lock(PROJECT, stack)
    code, out, err = run(
        Engine.connect(),
        tags.rootfs_ref(stack.debian.suite, rootfs.rootfs_spec(stack, lock).key),
        command,
        user=user,
        working_dir="/src",
        environment={"HOME": "/tmp"},
        volumes={str(Checkout.clone(folder / "clone").folder): {"bind": "/src", "mode": "ro"}},
    )
    return code, out + err


@pytest.mark.parametrize("options", [[], ["--no-smoke"]])
def test_without_root_it_prints_the_commands_and_exits_with_3(tmp_path: Path, options: list[str]) -> None:
    code, text = on_fresh_debian(tmp_path, ["bash", "./install.sh", *options], "10001:10001")
    assert code == 3, text
    command = next(line for line in text.splitlines() if "apt-get" in line and "install" in line)
    for package in ("docker.io", "iptables", "mmdebstrap", "debian-archive-keyring", "python3-venv"):
        assert package in command
    assert "Nothing was changed" in text
    assert "Traceback" not in text


def test_a_dry_run_as_root_says_what_it_would_install(tmp_path: Path) -> None:
    code, text = on_fresh_debian(tmp_path, ["bash", "./install.sh", "--dry-run"], "0:0")
    assert code == 0, text
    assert "apt-get" in text
    assert "docker.io" in text
    assert "would make .venv" in text


def test_what_was_made_beside_a_look_that_fails_is_gone(tmp_path: Path) -> None:
    """The first .venv is begun before what is missing is installed."""
    copy = Checkout.clone(tmp_path / "copy")
    fault = 'import sys\nif "--dry-run" not in sys.argv:\n    print("error: planted", file=sys.stderr)\n    sys.exit(3)\n'
    (copy.folder / "src/sparkpin/host/preflight.py").write_text(fault, encoding="utf-8")
    done = subprocess.run(["./install.sh"], cwd=copy.folder, env=copy.env, capture_output=True, text=True, timeout=600)
    assert (done.returncode, "error: planted" in done.stderr) == (3, True)
    assert "making .venv" in done.stdout and not (copy.folder / ".venv").exists()
