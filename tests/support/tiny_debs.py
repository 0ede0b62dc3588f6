"""Debian packages with a made-up content, and root file systems of them: a real engine makes them in a second."""

from __future__ import annotations

import hashlib
import io
import lzma
import shutil
import tarfile
from pathlib import Path

import tiny_images

from sparkpin.build import rootfs
from sparkpin.core.epoch import EPOCH
from sparkpin.core.paths import Paths
from sparkpin.fetch.store import Store
from sparkpin.pins.schema import LockedDeb


def tar_of(*members: tuple[str, bytes | str | None]) -> bytes:
    """A path with a file's bytes, with a symbolic link's target, or with None for a folder."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for path, content in members:
            member = tarfile.TarInfo(path)
            member.mode = 0o755
            if content is None:
                member.type = tarfile.DIRTYPE
            elif isinstance(content, str):
                member.type, member.linkname = tarfile.SYMTYPE, content
            else:
                member.size = len(content)
            tar.addfile(member, io.BytesIO(content) if isinstance(content, bytes) else None)
    return out.getvalue()


def add_deb(paths: Paths, name: str, data: bytes, *, suffix: str = ".xz") -> LockedDeb:
    """A package with this data.tar in the store."""
    members = {"debian-binary": b"2.0\n", f"data.tar{suffix}": lzma.compress(data)}
    content = rootfs.join_deb(members)
    source = paths.project / f"{name}.deb"
    source.write_bytes(content)
    sha256 = hashlib.sha256(content).hexdigest()
    deb = LockedDeb(name=name, version="1", file=f"{name}_1_all.deb", size=len(content), sha256=sha256)
    Store(paths.store).add(source, deb)
    return deb


def tiny_paths(folder: Path) -> Paths:
    for name in ("project", "cache"):
        (folder / name).mkdir(parents=True)
    return Paths(folder / "project", folder / "cache", folder / "home")


def tiny_spec(paths: Paths, script: str, *debs: LockedDeb, platform: str = "linux/amd64") -> rootfs.RootfsSpec:
    return rootfs.RootfsSpec(
        suite="tiny", platform=platform, debs=list(debs), merged=["bin", "lib", "lib64"], script=script, epoch=EPOCH
    )


def shell_deb(paths: Paths) -> LockedDeb:
    """A shell and rm, whose files lie below /bin and /lib as those of a package of Debian 12."""
    tar = tiny_images.make_rootfs(paths.project / "shell.tar", ["rm"])
    deb = add_deb(paths, "shell", tar.read_bytes())
    shutil.rmtree(tar, ignore_errors=True)
    return deb
