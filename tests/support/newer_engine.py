"""A newer Docker engine than this machine's: the one of the next Debian, in a root file system of its own.

The root file system is made once for a user (half a minute, 500 MB in SPARKPIN_CACHE) and never written to afterwards.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from private_engine import private_engine

from sparkpin.core import files
from sparkpin.core.paths import Paths
from sparkpin.fetch import debs
from sparkpin.host.daemon import Daemon
from sparkpin.host.engine import Engine

SUITE = "trixie"
NEWER: dict[str, dict[str, object]] = {  # name -> its settings
    "newer-overlay2": {},
    "newer-containerd": {"features": {"containerd-snapshotter": True}},
}
PACKAGES = ("docker.io", "docker-cli", "docker-buildx", "iptables", "ca-certificates")
NEEDED = f"to run it: root on Debian, {debs.HOST_PACKAGES}, a mirror that has {SUITE}"
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
    """The root file system with the newer engine and its CLI."""
    if os.geteuid() != 0 or not shutil.which("mmdebstrap") or not debs.KEYRING.is_file():
        pytest.skip(NEEDED)
    paths = Paths.from_env()
    argv = [
        *("mmdebstrap", "--mode=root", "--variant=essential", "--format=directory", "--skip=output/dev"),
        *("--aptopt=APT::Install-Recommends false", "--dpkgopt=force-unsafe-io"),
        *(f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "man", "locale")),
        *(f"--include={','.join(PACKAGES)}", SUITE),
    ]
    key = hashlib.sha256(json.dumps([argv, platform.machine()]).encode()).hexdigest()
    folder = paths.cache / "test-engines"
    root = folder / f"{SUITE}-{key[:12]}"
    with files.lock(paths.locks / "test-engines.lock"):
        if not root.is_dir():
            files.sweep(folder)
            with files.atomic_folder(root) as made:
                done = subprocess.run(
                    [*argv, str(made), "-"], input="\n".join(mirror()), capture_output=True, text=True, check=False
                )
                if done.returncode != 0:
                    errors = "; ".join(line for line in done.stderr.splitlines() if line.startswith("E: "))
                    pytest.skip(f"mmdebstrap made no {SUITE} ({errors}); {NEEDED}")
                (made / "dev").mkdir(exist_ok=True)
    return root


def mirror() -> list[str]:
    """The newer suite's lines of a sources.list, from the mirror that this machine uses for its own suite."""
    own = platform.freedesktop_os_release().get("VERSION_CODENAME", SUITE)
    return [line.replace(f" {own}", f" {SUITE}") for line in debs.sources(debs.mirrors_of(own))]


@contextlib.contextmanager
def newer_engine(root: Path, settings: dict[str, object]) -> Iterator[Engine]:
    def change(daemon: Daemon) -> Daemon:
        wrapper = ("unshare", "--net", "--mount", "sh", "-c", ENTER, "enter", str(root))
        return replace(daemon, wrapper=wrapper, settings=json.dumps(settings))

    with private_engine(change) as engine:
        yield engine


def newer_cli(root: Path, folder: Path) -> Path:
    """A folder for PATH whose `docker` is the newer CLI, which builds through buildx. It sees files below /tmp."""
    folder.mkdir()
    script = folder / "docker"
    command = shlex.join(["unshare", "--mount", "sh", "-c", ENTER, "enter", str(root), "/usr/bin/docker"])
    script.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    script.chmod(0o755)
    return folder
