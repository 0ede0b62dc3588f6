"""A real systemd as process 1 of namespaces of its own, in a root that has nothing else: programs of this machine, the
targets that a unit names, and what a test puts there."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from fake_image import libraries
from watched import until

SYSTEMD, UNITS = Path("/lib/systemd/systemd"), Path("/lib/systemd/system")
PROGRAMS = (SYSTEMD, *map(Path, ("/usr/bin/systemctl", "/usr/bin/dash", "/usr/bin/sleep")))
TARGETS = ("basic", "sysinit", "multi-user", "network", "network-online", "shutdown", "slices", "sockets", "paths",
           "timers", "local-fs", "swap")  # fmt: skip
# Arguments: the root; a folder to mount cgroups at; a name for one of them. `exec` all along: it stays process 1.
BOOT = """set -e
mount --make-rprivate /
mount --bind $0 $0
mount -t proc proc $0/proc
mount -t tmpfs tmpfs $0/run
mount -t tmpfs tmpfs $0/dev
mknod -m 666 $0/dev/null c 1 3
mount -t cgroup2 none $1
mkdir -p $1/$2
echo 0 > $1/$2/cgroup.procs
umount $1
exec unshare --cgroup sh -c 'mount -t cgroup2 none $0/sys/fs/cgroup; exec env -i container=test PATH=/usr/bin:/bin \
  $(command -v chroot) $0 /lib/systemd/systemd --unit=multi-user.target --log-target=console --show-status=no' $0
"""
CLEAN = "mount -t cgroup2 none $0 && find $0/$1 -depth -type d -exec rmdir {} +"


@dataclass(frozen=True)
class Booted:
    root: Path
    process: int  # its process 1, as this machine counts

    def systemctl(self, *words: str) -> str:
        enter = ["nsenter", "-t", str(self.process), "--mount", "--pid", "--cgroup", "chroot", str(self.root)]
        done = subprocess.run([*enter, "/usr/bin/systemctl", *words], capture_output=True, text=True)
        return (done.stdout + done.stderr).strip()

    def state(self, unit: str) -> str:
        return self.systemctl("show", "--property=ActiveState,SubState", "--value", unit).replace("\n", " ")


def make_root(folder: Path) -> Path:
    if os.geteuid() != 0 or not all(path.exists() for path in PROGRAMS) or not shutil.which("unshare"):
        pytest.skip("needs root, systemd and util-linux (apt-get install systemd util-linux) for namespaces")
    for file in {*PROGRAMS, *(library for program in PROGRAMS for library in libraries(program))}:
        place = folder / file.relative_to("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file.resolve(), place)
    for name in ("proc", "sys/fs/cgroup", "run", "dev", "tmp", "bin", "etc/systemd/system/multi-user.target.wants"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    shutil.copy2("/usr/bin/dash", folder / "bin/sh")
    (folder / "etc/machine-id").write_text(f"{1:032}\n")
    (folder / "etc/os-release").write_text("ID=test\n")
    (folder / UNITS.relative_to("/")).mkdir(parents=True)
    for target in TARGETS:
        shutil.copy2(UNITS / f"{target}.target", folder / UNITS.relative_to("/"))
    (folder / "etc/systemd/system/shutdown.target.d").mkdir()
    allowed = folder / "etc/systemd/system/shutdown.target.d/by-hand.conf"  # else only a whole shutdown could start it
    allowed.write_text("[Unit]\nRefuseManualStart=no\n")
    return folder


@contextlib.contextmanager
def booted(root: Path) -> Iterator[Booted]:
    """From its power button to the loss of its power: nothing in it is stopped in good order."""
    name = f"sparkpin-test-{os.getpid()}"
    with tempfile.TemporaryDirectory() as cgroups, tempfile.TemporaryFile() as log:
        argv = ["unshare", "--fork", "--pid", "--mount", "--kill-child", "sh", "-c", BOOT, str(root), cgroups, name]
        with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log) as outer:
            try:
                children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
                until(lambda: bool(children.read_text().split()), 10)
                machine = Booted(root, int(children.read_text().split()[0]))
                answers = ("starting", "running", "degraded")
                until(lambda: outer.poll() is not None or machine.systemctl("is-system-running") in answers, 60)
                log.seek(0)
                assert outer.poll() is None, log.read().decode(errors="replace")
                yield machine
            finally:
                outer.send_signal(signal.SIGKILL)
        time.sleep(0.5)  # until the kernel has ended what was in the namespace
        subprocess.run(["unshare", "--mount", "sh", "-c", CLEAN, cgroups, name], capture_output=True)
