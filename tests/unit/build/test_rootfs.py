"""The root file system: what decides its key, the first root of the packages' files, what of the cache is trusted."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from places import PROJECT
from tiny_debs import add_deb, tar_of, tiny_paths, tiny_spec

from sparkpin.build import rootfs
from sparkpin.core.errors import BuildError, IntegrityError
from sparkpin.core.paths import Paths
from sparkpin.fetch.store import Store
from sparkpin.pins.manifests import load_stack, load_stack_lock

ENGINE: Any = SimpleNamespace()


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return tiny_paths(tmp_path)


def test_key_follows_packages_script_and_platform_and_nothing_else() -> None:
    stack = load_stack(PROJECT, "cpu")
    lock = load_stack_lock(PROJECT, stack)
    spec = rootfs.rootfs_spec(stack, lock)
    assert spec.key == rootfs.rootfs_spec(stack, lock.model_copy(update={"wheels": []})).key
    first, *rest = lock.debs
    newer = lock.model_copy(update={"debs": [first.model_copy(update={"sha256": "0" * 64}), *rest]})
    far = stack.model_copy(update={"platform": "linux/arm64"})
    others = [rootfs.rootfs_spec(stack, newer), rootfs.rootfs_spec(far, lock)]
    others += [spec.model_copy(update={"script": spec.script + "\n"}), spec.model_copy(update={"merged": []})]
    assert len({spec.key, *(other.key for other in others)}) == 5


def test_a_damaged_package_is_not_used(paths: Paths) -> None:
    deb = add_deb(paths, "a", tar_of(("./etc/a", b"a")))
    path = Store(paths.store).path(deb.sha256)
    path.chmod(0o644)
    path.write_bytes(b"x" * deb.size)
    with pytest.raises(IntegrityError, match=deb.file):
        rootfs.build_rootfs(paths, ENGINE, tiny_spec(paths, "", deb))
    assert not list(paths.cache.glob("rootfs/*")) and not list(paths.work.iterdir())


@pytest.mark.parametrize(("data", "suffix"), [(b"no tar", ".xz"), (tar_of(), ".zst")])
def test_what_is_no_package_is_an_error_that_names_it(paths: Paths, data: bytes, suffix: str) -> None:
    deb = add_deb(paths, "a", data, suffix=suffix)
    with pytest.raises(BuildError, match=deb.file):
        rootfs.build_rootfs(paths, ENGINE, tiny_spec(paths, "", deb))
    assert not list(paths.cache.glob("rootfs/*"))


def test_files_below_merged_folders_lie_in_usr(paths: Paths) -> None:
    """Links stay as they are. What several packages bring, Debian 13's own merged links included, comes once."""
    data = tar_of(("./", None), ("./bin/", None), ("./bin/sh", b"shell"), ("./lib/x/", None), ("./lib/x/y", "../../z"))
    other = tar_of(("./", None), ("./bin", "usr/bin"), ("./usr/bin/", None), ("./usr/bin/more", b"more"))
    debs = [add_deb(paths, "a", data), add_deb(paths, "b", other)]
    target = paths.project / "first.tar"
    rootfs.write_first_root(target, tiny_spec(paths, "exit", *debs), Store(paths.store))
    with tarfile.open(target) as tar:
        found = {member.name: member for member in tar.getmembers()}
        assert len(found) == len(tar.getmembers())
        links = {name: member.linkname for name, member in found.items() if member.issym()}
        assert links == {"bin": "usr/bin", "lib": "usr/lib", "lib64": "usr/lib64", "usr/lib/x/y": "../../z"}
        texts = {name: tar.extractfile(member) for name, member in found.items() if member.isreg()}
        read = {name: file.read() for name, file in texts.items() if file}
        assert (read["usr/bin/sh"], read["usr/bin/more"], read["debs/rootfs.sh"]) == (b"shell", b"more", b"exit")
        assert b"data.tar " in read[f"debs/{debs[0].file}"] and data in read[f"debs/{debs[0].file}"]


def test_a_cached_tar_is_used_until_it_is_damaged(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the engine's part is replaced."""
    runs = list[Path]()

    def make_rootfs(work: Path, *_: object) -> Path:
        runs.append(work)
        (work / "made.tar").write_bytes(tar_of(("etc/a", b"a"), (".dockerenv", b""), ("etc/resolv.conf", b"x")))
        return work / "made.tar"

    monkeypatch.setattr(rootfs, "make_rootfs", make_rootfs)
    spec = tiny_spec(paths, "")
    tar = rootfs.build_rootfs(paths, ENGINE, spec)
    with tarfile.open(fileobj=io.BytesIO(good := tar.read_bytes())) as found:
        assert found.getnames() == ["etc/a"], "nothing that an engine leaves"
    assert tar == paths.cache / "rootfs" / f"{spec.key}.tar"
    assert rootfs.build_rootfs(paths, ENGINE, spec) == tar and len(runs) == 1
    tar.write_bytes(good[:-1] + b"x")
    rootfs.build_rootfs(paths, ENGINE, spec)
    assert tar.read_bytes() == good and len(runs) == 2 and not list(paths.work.iterdir())
