"""The root file system: what decides its key, the same bytes from different writers, what is cleaned up."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

import pytest
from places import PROJECT

from sparkpin.build import rootfs
from sparkpin.core.errors import IntegrityError
from sparkpin.core.paths import Paths
from sparkpin.fetch.store import Store
from sparkpin.pins.manifests import load_stack, load_stack_lock
from sparkpin.pins.schema import LockedDeb, Stack, StackLock


@pytest.fixture
def stack() -> Stack:
    return load_stack(PROJECT, "cpu")


@pytest.fixture
def lock(stack: Stack) -> StackLock:
    return load_stack_lock(PROJECT, stack)


def test_key_follows_packages_and_nothing_else(stack: Stack, lock: StackLock) -> None:
    key = rootfs.rootfs_spec(stack, lock).key
    assert key == rootfs.rootfs_spec(stack, lock.model_copy(update={"wheels": []})).key
    first, *rest = lock.debs
    newer = lock.model_copy(update={"debs": [first.model_copy(update={"sha256": "0" * 64}), *rest]})
    assert rootfs.rootfs_spec(stack, newer).key != key
    assert rootfs.rootfs_spec(stack.model_copy(update={"platform": "linux/arm64"}), lock).key != key


def test_damaged_package_is_not_used(tmp_path: Path, stack: Stack, lock: StackLock) -> None:
    deb = LockedDeb(name="a", version="1", file="a_1_all.deb", size=4, sha256=hashlib.sha256(b"good").hexdigest())
    paths = Paths(tmp_path, tmp_path / "cache", tmp_path / "home")
    path = Store(paths.store).path(deb.sha256)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"evil")
    with pytest.raises(IntegrityError, match=r"a_1_all\.deb"):
        rootfs.build_rootfs(paths, rootfs.rootfs_spec(stack, lock.model_copy(update={"debs": [deb]})), print)
    assert not list(paths.cache.glob("rootfs/*"))


def test_cached_tar_is_used_until_it_is_damaged(
    tmp_path: Path, stack: Stack, lock: StackLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only mmdebstrap's run is replaced."""
    runs, said = list[Path](), list[str]()
    paths = Paths(tmp_path, tmp_path / "cache", tmp_path / "home")

    def made(_: rootfs.RootfsSpec, repo: Path) -> list[bytes]:
        runs.append(repo)
        return [b"tar", b"bytes"]

    monkeypatch.setattr(rootfs, "made", made)
    empty = rootfs.rootfs_spec(stack, lock.model_copy(update={"debs": []}))
    tar = rootfs.build_rootfs(paths, empty, said.append)
    assert tar == paths.cache / "rootfs" / f"{empty.key}.tar"
    assert rootfs.build_rootfs(paths, empty, said.append) == tar and len(runs) == 1
    tar.write_bytes(b"tarbytez")
    rootfs.build_rootfs(paths, empty, said.append)
    assert tar.read_bytes() == b"tarbytes" and len(runs) == 2
    assert not any(repo.exists() for repo in runs)


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a folder to uid 10001 needs root")
def test_clean_up_leaves_the_user_and_the_licences(tmp_path: Path) -> None:
    root = tmp_path / "root"
    gone = [
        *("etc/resolv.conf", "etc/hostname", "etc/apt/sources.list", "etc/passwd-", "var/lib/apt/lists/x"),
        *("var/log/dpkg.log", "var/cache/ldconfig/aux-cache", "usr/share/man/man1/a.1", "usr/share/locale/de/a.mo"),
        *("usr/share/doc/a/changelog.gz", "usr/share/doc/b/README", "var/lib/dpkg/status-old"),
    ]
    kept = ["usr/share/doc/a/copyright", "etc/ssl/certs/a.pem", "var/lib/dpkg/status", "usr/lib/python3.11/os.py"]
    for name in [*gone, *kept]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")
    (root / "etc/passwd").write_text("root:*:0:0:root:/root:/bin/bash\n")
    (root / "etc/group").write_text("root:*:0:\n")
    subprocess.run([rootfs.CUSTOMIZE, root], check=True)
    assert [name for name in gone if (root / name).exists()] == []
    assert [name for name in kept if not (root / name).exists()] == []
    assert (root / "etc/passwd").read_text().splitlines()[1].split(":")[:4] == ["sparkpin", "*", "10001", "10001"]
    assert (root / "home/sparkpin").stat().st_uid == (root / "home/sparkpin").stat().st_gid == 10001
    assert not (root / "usr/share/doc/b").exists()
