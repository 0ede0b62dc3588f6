"""Newer Docker engines than this machine's: those of later Debians, each in a root file system of its own.

A root file system is made once for a user (two minutes, 500 MB in SPARKPIN_CACHE) and never written to afterwards.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Iterator
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

DEBIAN_13 = "trixie"
CONTAINERD: dict[str, object] = {"features": {"containerd-snapshotter": True}}
NEWER: dict[str, tuple[str, dict[str, object]]] = {  # name -> suite, settings
    "docker-26-overlay2": (DEBIAN_13, {}),
    "docker-26-containerd": (DEBIAN_13, CONTAINERD),
    "docker-28-overlay2": ("forky", {}),
    "docker-28-containerd": ("forky", CONTAINERD),
}
PACKAGES = ["docker.io", "docker-cli", "docker-buildx", "iptables", "ca-certificates", "python3"]
NEEDED = (
    "to run it: root, apt, debian-archive-keyring, a mirror that has the suite, an engine. For a frozen mirror the "
    'configuration of apt has to say Acquire::Check-Valid-Until "false"; sparkpin follows it'
)
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
def newer_root() -> Callable[[str], Path]:
    """By suite: the root file system with its engine, CLI and Python, made as those of the images are."""
    if os.geteuid() != 0:
        pytest.skip(NEEDED)
    return functools.cache(root_of)


def root_of(suite: str) -> Path:
    paths = Paths.from_env()
    system = Debian(suite=suite, packages=PACKAGES)
    stack = load_stack(PROJECT, "cpu").model_copy(update={"platform": this_platform(), "debian": system})
    key = hashlib.sha256(f"{stack.platform} {system}".encode()).hexdigest()
    folder = paths.cache / "test-engines"
    root = folder / f"{suite}-{key[:12]}"
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
def newer_engine(name: str, newer_root: Callable[[str], Path]) -> Iterator[Engine]:
    """name: of NEWER."""
    suite, settings = NEWER[name]
    root = newer_root(suite)
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
