"""Root file systems of made-up packages, by a real engine: what may go wrong while one is made."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from tiny_debs import add_deb, shell_deb, tar_of, tiny_paths, tiny_spec

from sparkpin.build import rootfs
from sparkpin.core.errors import BuildError, HostError
from sparkpin.core.paths import Paths
from sparkpin.host.engine import Engine

pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="the packages' shell is this machine's")


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return tiny_paths(tmp_path)


def read(tar: Path) -> dict[str, bytes]:
    with tarfile.open(tar) as opened:
        files = [member for member in opened.getmembers() if member.isreg()]
        return {file.name: data.read() for file in files if (data := opened.extractfile(file))}


def test_the_script_runs_in_the_packages_without_a_network(paths: Paths) -> None:
    script = "set -eu; read line </etc/a; while read name rest; do echo $name; done </proc/net/dev >/etc/net\n"
    script += "echo $1 $line >/etc/b; rm -r /debs\n"
    spec = tiny_spec(paths, script, shell_deb(paths), add_deb(paths, "a", tar_of(("./etc/a", b"text\n"))))
    found = read(rootfs.build_rootfs(paths, Engine.connect(), spec))
    assert found["etc/b"] == b"%d text\n" % spec.epoch and "usr/bin/sh" in found
    assert {line for line in found["etc/net"].split() if line.endswith(b":")} == {b"lo:"}
    assert not [name for name in found if name.startswith(("debs", "dev/", "etc/resolv.conf"))]


def test_a_script_that_fails_leaves_nothing(paths: Paths) -> None:
    spec = tiny_spec(paths, "echo planted fault; exit 7\n", shell_deb(paths))
    with pytest.raises(BuildError, match="planted fault"):
        rootfs.build_rootfs(paths, Engine.connect(), spec)
    assert not list(paths.cache.glob("rootfs/*")) and not list(paths.work.iterdir())


def test_a_platform_that_the_engine_cannot_run_is_named(paths: Paths) -> None:
    """As without emulation: what the shell's name leads to is of no format that the kernel knows."""
    spec = tiny_spec(paths, "", add_deb(paths, "a", tar_of(("./bin/sh", b"\x7fELF of another machine"))))
    with pytest.raises(HostError, match="linux/amd64"):
        rootfs.build_rootfs(paths, Engine.connect(), spec)


PROGRAM = """\
import sys
from pathlib import Path
from sparkpin.build import rootfs
from sparkpin.core.paths import Paths
from sparkpin.host.engine import Engine
spec = rootfs.RootfsSpec.model_validate_json(sys.argv[4])
rootfs.build_rootfs(Paths(*map(Path, sys.argv[1:4])), Engine.connect(), spec)
"""


def test_a_killed_run_is_not_trusted_and_the_next_one_makes_it(paths: Paths) -> None:
    spec = tiny_spec(paths, "i=0; while [ $i -lt 2000000 ]; do i=$((i+1)); done; rm -r /debs\n", shell_deb(paths))
    argv = [sys.executable, "-c", PROGRAM, str(paths.project), str(paths.cache), str(paths.home)]
    with subprocess.Popen([*argv, spec.model_dump_json()]) as run:
        end = time.monotonic() + 60
        while not list(paths.work.glob("rootfs-*/context/root.tar")):
            assert run.poll() is None and time.monotonic() < end
            time.sleep(0.02)
        run.send_signal(signal.SIGKILL)
    assert not list(paths.cache.glob("rootfs/*.tar"))
    tar = rootfs.build_rootfs(paths, Engine.connect(), spec)
    assert "usr/bin/sh" in read(tar) and not list(paths.work.iterdir())
