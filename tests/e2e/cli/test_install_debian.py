"""install.sh on a fresh Debian 12: a container of the stack's own root file system."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from checkout import Checkout, heeds_interrupts
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
    for package in ("docker.io", "iptables", "python3-venv"):
        assert package in command
    assert "Nothing was changed" in text
    assert "Traceback" not in text


def test_a_dry_run_as_root_says_what_it_would_install(tmp_path: Path) -> None:
    code, text = on_fresh_debian(tmp_path, ["bash", "./install.sh", "--dry-run"], "0:0")
    assert code == 0, text
    assert "apt-get" in text
    assert "docker.io" in text
    assert "would make .venv" in text


WAITS = """import pathlib, sys, time
if "--dry-run" not in sys.argv:
    while not pathlib.Path(".venv/bin/python").exists():
        time.sleep(0.05)
    {}
"""


@pytest.mark.parametrize(
    ("fault", "code"), [("sys.exit('planted')", 1), ("print('begun', flush=True); time.sleep(60)", 130)]
)
def test_a_venv_begun_beside_a_look_that_fails_is_gone(tmp_path: Path, fault: str, code: int) -> None:
    """The first .venv is made beside what apt installs. That one fails here, or somebody presses Ctrl-C."""
    copy = Checkout.clone(tmp_path / "copy")
    (copy.folder / "src/sparkpin/host/preflight.py").write_text(WAITS.format(fault), encoding="utf-8")
    with subprocess.Popen(
        ["./install.sh"],
        cwd=copy.folder,
        env=copy.env,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heeds_interrupts,
    ) as running:
        assert running.stdout
        for line in running.stdout:
            if line == "begun\n":
                os.killpg(running.pid, signal.SIGINT)
        assert running.wait(60) == code
    assert not (copy.folder / ".venv").exists()
