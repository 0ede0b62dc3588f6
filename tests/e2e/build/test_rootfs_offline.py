"""The real root file system: made offline, twice the same bytes, and nothing is left of a killed run."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from places import PROJECT

from sparkpin.build import rootfs
from sparkpin.core.paths import Paths
from sparkpin.fetch.store import Store
from sparkpin.pins.manifests import load_stack, load_stack_lock
from sparkpin.pins.schema import Stack, StackLock

pytestmark = pytest.mark.slow


@pytest.fixture
def stack() -> Stack:
    return load_stack(PROJECT, "cpu")


@pytest.fixture
def lock(stack: Stack) -> StackLock:
    return load_stack_lock(PROJECT, stack)


def test_real_rootfs_is_made_offline_and_twice_the_same(tmp_path: Path, stack: Stack, lock: StackLock) -> None:
    """In a network namespace without any interface up, with another zone, umask, Python and temporary folder."""
    mine = Paths.from_env(PROJECT)
    if not all(Store(mine.store).has(deb) for deb in lock.debs):
        pytest.skip("the packages of the cpu stack are not in the store: invoke build --fetch-only")
    if os.geteuid() != 0 or not shutil.which("mmdebstrap"):
        pytest.skip("needs root (for a network namespace) and mmdebstrap")
    first = rootfs.build_rootfs(mine, rootfs.rootfs_spec(stack, lock), print)
    other = Paths(PROJECT, tmp_path / "cache", tmp_path / "home")
    other.cache.mkdir()
    (other.cache / "store").symlink_to(mine.store)
    program = (
        "import os, sys; from pathlib import Path; from sparkpin.build import rootfs; "
        "from sparkpin.core.paths import Paths; "
        "from sparkpin.pins.manifests import load_stack, load_stack_lock; os.umask(0o077); "
        "paths = Paths(*map(Path, sys.argv[1:])); stack = load_stack(paths.project, 'cpu'); "
        "spec = rootfs.rootfs_spec(stack, load_stack_lock(paths.project, stack)); "
        "print(rootfs.build_rootfs(paths, spec, lambda line: None))"
    )
    argv = ["unshare", "-n", sys.executable, "-c", program, str(PROJECT), str(other.cache), str(other.home)]
    env = {**os.environ, "TZ": "Asia/Tokyo", "LANG": "tr_TR.UTF-8", "PYTHONOPTIMIZE": "2", "PYTHONHASHSEED": "7"}
    assert "PYTHONDONTWRITEBYTECODE" not in env  # packages' scripts would write other bytecode without it
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    second = Path(done.stdout.strip())
    assert hashlib.sha256(first.read_bytes()).digest() == hashlib.sha256(second.read_bytes()).digest()
    root = tmp_path / "root"
    root.mkdir()
    subprocess.run(["tar", "-C", root, "-xf", second], check=True)
    check = (
        "import ssl, sqlite3, venv, sys, pwd; ssl.create_default_context(); "
        "print(sys.version_info[:2], pwd.getpwuid(10001).pw_dir)"
    )
    argv = ["chroot", "--userspec=10001:10001", str(root), "python3", "-c", check]
    assert subprocess.check_output(argv, text=True).strip() == "(3, 11) /home/sparkpin"
    assert not (root / "usr/bin/apt-get").exists()


def test_a_killed_run_leaves_neither_mounts_nor_processes(
    tmp_path: Path, stack: Stack, lock: StackLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = Paths.from_env(PROJECT)
    if not all(Store(mine.store).has(deb) for deb in lock.debs):
        pytest.skip("the packages of the cpu stack are not in the store: invoke build --fetch-only")
    if os.geteuid() != 0 or not shutil.which("mmdebstrap"):
        pytest.skip("needs root (others' mmdebstrap makes its own namespaces) and mmdebstrap")
    work = tmp_path / "tmp"
    work.mkdir(mode=0o755)
    program = (
        "import sys; from pathlib import Path; from sparkpin.build import rootfs; "
        "from sparkpin.core.paths import Paths; "
        "from sparkpin.pins.manifests import load_stack, load_stack_lock; "
        "paths = Paths(*map(Path, sys.argv[1:])); stack = load_stack(paths.project, 'cpu'); "
        "rootfs.build_rootfs(paths, rootfs.rootfs_spec(stack, load_stack_lock(paths.project, stack)), print)"
    )
    other = Paths(PROJECT, tmp_path / "cache", tmp_path / "home")
    other.cache.mkdir()
    (other.cache / "store").symlink_to(mine.store)
    argv = [sys.executable, "-c", program, str(PROJECT), str(other.cache), str(other.home)]
    with subprocess.Popen(argv, env={**os.environ, "TMPDIR": str(work)}) as run:
        until(lambda: any(str(work) in mounts for mounts in mounts_by_process().values()), "mmdebstrap's mounts")
        assert str(work) not in Path("/proc/self/mounts").read_text()
        run.kill()
    until(lambda: not any(str(work) in mounts for mounts in mounts_by_process().values()), "the end of all of it")
    (left,) = work.iterdir()  # only files, which the next run of this cache removes
    monkeypatch.setattr(tempfile, "tempdir", str(work))
    with rootfs.workplace(other) as fresh:
        assert list(work.iterdir()) == [fresh] != [left]


def mounts_by_process() -> dict[str, str]:
    found = {}
    for path in Path("/proc").glob("[0-9]*/mounts"):
        with suppress(OSError):  # it ended
            found[path.parent.name] = path.read_text()
    return found


def until(condition: Callable[[], bool], what: str, seconds: float = 400) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.05)
