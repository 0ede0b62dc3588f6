"""A newer Docker engine than this machine's: the one of the next Debian, in a root file system of its own.

The root file system is made once for a user (two minutes, 500 MB in SPARKPIN_CACHE) and never written to afterwards.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from places import PROJECT
from private_engine import private_engine

from sparkpin.build.rootfs import build_rootfs, rootfs_spec
from sparkpin.core import files
from sparkpin.core.errors import SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.fetch import debs
from sparkpin.fetch.store import Store
from sparkpin.host.engine import Engine
from sparkpin.host.machine import this_platform
from sparkpin.pins.manifests import load_stack, stack_inputs
from sparkpin.pins.schema import Debian, Stack, StackLock

SUITE = "trixie"
NEWER: dict[str, dict[str, object]] = {  # name -> its settings
    "newer-overlay2": {},
    "newer-containerd": {"features": {"containerd-snapshotter": True}},
}
PACKAGES = ["docker.io", "docker-cli", "docker-buildx", "iptables", "ca-certificates", "python3"]
NEEDED = f"to run it: root, apt, debian-archive-keyring, a mirror that has {SUITE}, an engine"
# In mount namespaces of their own: nothing of this is mounted in the machine's.
ENTER = """\
set -eu
root=$1; shift
mount --bind "$root" "$root"
for name in proc sys dev tmp; do mount --rbind "/$name" "$root/$name"; done
for name in run root; do mount -t tmpfs tmpfs "$root/$name"; done
mount -o remount,bind,ro "$root"
cd "$root"
pivot_root . mnt  # a chroot alone would not do: docker exec enters a container by the root of its mount namespace
chroot mnt umount --lazy /
exec "$@"
"""


@pytest.fixture(scope="session")
def newer_root() -> Path:
    """The root file system with the newer engine, its CLI and Python, made as those of the images are."""
    if os.geteuid() != 0:
        pytest.skip(NEEDED)
    paths = Paths.from_env()
    system = Debian(suite=SUITE, packages=PACKAGES)
    stack = load_stack(PROJECT, "cpu").model_copy(update={"platform": this_platform(), "debian": system})
    key = hashlib.sha256(f"{stack.platform} {system}".encode()).hexdigest()
    folder = paths.cache / "test-engines"
    root = folder / f"{SUITE}-{key[:12]}"
    with files.lock(paths.locks / "test-engines.lock"):
        if not root.is_dir():
            files.sweep(folder)
            paths.work.mkdir(parents=True, exist_ok=True)
            with (
                tempfile.TemporaryDirectory(prefix="newer-", dir=paths.work) as work,
                files.atomic_folder(root) as made,
            ):
                try:
                    tar = make_newer(Paths(PROJECT, Path(work, "cache"), Path(work, "home")), stack)
                except SparkpinError as error:
                    pytest.skip(f"{error}; {NEEDED}")
                subprocess.run(["tar", "-C", made, "-xf", tar], check=True)
    return root


def make_newer(paths: Paths, stack: Stack) -> Path:
    apt = paths.cache / "apt"
    apt.mkdir(parents=True)
    closure = debs.debian_closure(apt, stack)
    debs.fetch_debs(stack, "", closure, Store(paths.store))
    lock = StackLock(stack=stack.name, inputs=stack_inputs(stack), debs=closure, wheels=[])
    return build_rootfs(paths, Engine.connect(), rootfs_spec(stack, lock))


@contextlib.contextmanager
def newer_engine(root: Path, settings: dict[str, object]) -> Iterator[Engine]:
    enter = ("unshare", "--net", "--mount", "sh", "-c", ENTER, "enter", str(root))
    with private_engine(enter=enter, settings=settings) as engine:
        yield engine


def newer_cli(root: Path, folder: Path) -> Path:
    """A folder for PATH whose `docker` is the newer CLI, which builds through buildx. It sees files below /tmp."""
    folder.mkdir()
    script = folder / "docker"
    command = shlex.join(["unshare", "--mount", "sh", "-c", ENTER, "enter", str(root), "/usr/bin/docker"])
    script.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    script.chmod(0o755)
    return folder
