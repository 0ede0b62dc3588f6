"""Layers and saved images that hold whatever one may hold, as other tools write them."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path

CAPABILITY = {
    "SCHILY.xattr.security.capability": b"\x01\0\0\x02\0\x04\0\0\0\0\0\0\0\0\0\0\0\0\0\xff".decode(
        "utf-8", "surrogateescape"
    )
}
LONG = "opt/" + "a-long-folder-name/" * 6 + "file.txt"


def member(name: str, data: bytes | None = None, **fields: object) -> tuple[tarfile.TarInfo, bytes | None]:
    info = tarfile.TarInfo(name)
    info.mode = 0o644
    if data is not None:
        info.size = len(data)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data


def tar_header(name: str, format: int = tarfile.GNU_FORMAT, **fields: object) -> bytes:
    """A header alone."""
    return member(name, **fields)[0].tobuf(format, "utf-8", "surrogateescape")


def folder_member(name: str, mode: int = 0o755) -> tuple[tarfile.TarInfo, bytes | None]:
    return member(name, type=tarfile.DIRTYPE, mode=mode)


def hardlink(name: str, to: str, **fields: object) -> tuple[tarfile.TarInfo, bytes | None]:
    return member(name, type=tarfile.LNKTYPE, linkname=to, **fields)


def symlink(name: str, to: str, **fields: object) -> tuple[tarfile.TarInfo, bytes | None]:
    return member(name, type=tarfile.SYMTYPE, linkname=to, **fields)


def everything() -> list[tuple[tarfile.TarInfo, bytes | None]]:
    return [
        folder_member("opt"),
        member("opt/tool", b"#!/bin/sh\n", mode=0o4755, uid=10001, gid=10001, uname="me", gname="us"),
        hardlink("opt/tool-2", "opt/tool", mode=0o4755, uid=10001, gid=10001),
        member("opt/null", type=tarfile.CHRTYPE, devmajor=1, devminor=3, mode=0o666),
        symlink("opt/link", "../etc/passwd"),
        member("opt/ping", b"binary", mode=0o755, pax_headers=CAPABILITY),
        member("opt/.wh.gone", b""),
        folder_member("opt/sub", 0o700),
        member("opt/sub/.wh..wh..opq", b"", mode=0o600),
        member(LONG, b"deep"),
        member("opt/caf\udce9", b"latin-1 name"),
        symlink("opt/to-far", "/" + "x" * 120),
    ]


def noise() -> list[tuple[tarfile.TarInfo, bytes | None]]:
    """What build steps leave behind."""
    return [
        folder_member("etc"),
        member("etc/resolv.conf", b""),
        folder_member("tmp", 0o1777),
        member("tmp/uv-123.lock", b""),
        folder_member("root", 0o700),
        folder_member("root/.cache", 0o700),
        member("root/.cache/x", b"x"),
    ]


def layer(
    members: Iterable[tuple[tarfile.TarInfo, bytes | None]], *, mtime: int = 5, format: int = tarfile.PAX_FORMAT
) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format, encoding="utf-8", errors="surrogateescape") as tar:
        for info, data in members:
            info.mtime = mtime
            tar.addfile(info, io.BytesIO(data) if data is not None else None)
    return out.getvalue()


def sha(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def save(path: Path, layers: list[bytes], *, oci: bool = False, labels: dict[str, str]) -> Path:
    """An archive as `docker save` writes it: up to 24, or from 25 on (`oci`)."""
    config = {
        "architecture": "amd64",
        "os": "linux",
        "created": "2026-11-21T08:00:00.123Z" if oci else "2026-11-20T07:00:00Z",
        "config": {"Hostname": "abc", "Labels": labels, "Env": ["B=1", "A=2"], "Cmd": None, "Image": "x"},
        "container_config": {"Hostname": "def"},
        "history": [{"created": "2026-11-21T08:00:00Z", "created_by": "RUN something"}],
        "rootfs": {"type": "layers", "diff_ids": [sha(data) for data in layers]},
    }
    body = json.dumps(config).encode()
    names = [f"blobs/sha256/{sha(blob)[7:]}" if oci else f"{number}/layer.tar" for number, blob in enumerate(layers)]
    config_name = f"blobs/sha256/{sha(body)[7:]}" if oci else f"{sha(body)[7:]}.json"
    with tarfile.open(path, "w") as tar:
        done: dict[bytes, str] = {}
        for name, blob in zip(names, layers, strict=True):
            info = tarfile.TarInfo(name)
            if blob in done and not oci:  # 20.10 writes a layer that comes twice as a link
                info.type, info.linkname = tarfile.SYMTYPE, f"../{done[blob]}"
                tar.addfile(info)
                continue
            info.size = len(blob)
            tar.addfile(info, io.BytesIO(blob))
            done[blob] = name
        for name, data in (
            (config_name, body),
            ("manifest.json", json.dumps([{"Config": config_name, "Layers": names, "RepoTags": ["a:b"]}]).encode()),
        ):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path
