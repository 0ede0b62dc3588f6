"""The real root file system of the cpu stack: the published bytes, whatever the host and its engine are."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import uv
from in_container import output_of
from newer_engine import DEBIAN_13
from newer_engine import newer_root as newer_root
from places import PROJECT

from sparkpin.core.paths import Paths
from sparkpin.distribute import digests
from sparkpin.fetch.store import Store
from sparkpin.host.engine import Engine
from sparkpin.pins.manifests import load_stack, load_stack_lock

pytestmark = pytest.mark.slow
# What a run on another host does: nothing but this process's own folders, and what the engine answers.
PROGRAM = """\
import os, sys
from pathlib import Path
os.umask(0o077)
from sparkpin.build import rootfs
from sparkpin.core.files import sha256_file
from sparkpin.core.paths import Paths
from sparkpin.host.engine import Engine
from sparkpin.pins.manifests import load_stack, load_stack_lock
paths = Paths(*map(Path, sys.argv[1:4]))
stack = load_stack(paths.project, "cpu")
spec = rootfs.rootfs_spec(stack, load_stack_lock(paths.project, stack))
print(sha256_file(rootfs.build_rootfs(paths, Engine.connect(), spec))[0])
"""
ODD = {
    "TZ": "Asia/Tokyo",
    "LANG": "tr_TR.UTF-8",
    "PYTHONOPTIMIZE": "2",
    "PYTHONHASHSEED": "7",
    "SOURCE_DATE_EPOCH": "1",
}


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    """With the store of this user and nothing else."""
    stack, mine = load_stack(PROJECT, "cpu"), Paths.from_env(PROJECT)
    if not all(Store(mine.store).has(deb) for deb in load_stack_lock(PROJECT, stack).debs):
        pytest.skip("the packages of the cpu stack are not in the store: invoke build --fetch-only")
    found = Paths(PROJECT, tmp_path / "cache", tmp_path / "home")
    found.cache.mkdir()
    found.store.symlink_to(mine.store)
    return found


@pytest.fixture(scope="session")
def published() -> str:
    """The layer's digest in pins/digests."""
    found = digests.load(PROJECT, "cpu")
    assert found
    return found.images["base"].layers["rootfs"].removeprefix("sha256:")


def test_debian_13_as_host(paths: Paths, published: str, newer_root: Callable[[str], Path], tmp_path: Path) -> None:
    """A container of it with the engine's socket: its own Python and Docker CLI, no mmdebstrap, no apt that is used."""
    engine, ref = Engine.connect(), "sparkpin/test-debian-13-host:latest"
    packages = tmp_path / "packages"
    argv = [sys.executable, "-m", "sparkpin.fetch.pip_settings", uv.find_uv_bin(), "pip", "install", "--quiet"]
    argv += ["--require-hashes", "--python-version", "3.13", "--target", str(packages)]
    argv += ["--requirements", str(PROJECT / "requirements.lock")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no packages for its Python: {done.stderr[-300:]}")
    with subprocess.Popen(["tar", "-C", newer_root(DEBIAN_13), "-c", "."], stdout=subprocess.PIPE) as tar:
        subprocess.run(["docker", "import", "-", ref], stdin=tar.stdout, check=True, capture_output=True)
    store = str(paths.store.resolve())
    mounts = {store: "/store", str(PROJECT): "/project", str(packages): "/packages"}
    start = 'mkdir /tmp/cache && ln -s /store /tmp/cache/store && exec python3 -c "$0" /project /tmp/cache /tmp/home'
    try:
        out = output_of(
            engine,
            ref,
            ["sh", "-c", f"! command -v mmdebstrap && python3 --version >&2 && {start}", PROGRAM],
            environment={"PYTHONPATH": "/packages:/project/src", "HOME": "/tmp", **ODD},
            volumes={
                **{source: {"bind": target, "mode": "ro"} for source, target in mounts.items()},
                "/var/run/docker.sock": {"bind": "/var/run/docker.sock", "mode": "rw"},
            },
        )
    finally:
        engine.client.api.remove_image(ref)
    assert out.split()[-1] == published
