"""install.sh on a fresh Debian 12: a container of the stack's own root file system."""

from __future__ import annotations

from pathlib import Path

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


def test_without_root_it_prints_the_command_and_exits_with_3(tmp_path: Path) -> None:
    code, text = on_fresh_debian(tmp_path, ["bash", "./install.sh"], "10001:10001")
    assert code == 3 and "python3-venv" in text and "Traceback" not in text


def test_a_dry_run_as_root_changes_nothing(tmp_path: Path) -> None:
    """The checkout is mounted read-only."""
    code, text = on_fresh_debian(tmp_path, ["bash", "./install.sh", "--dry-run"], "0:0")
    assert code == 0 and "would make .venv" in text, text
