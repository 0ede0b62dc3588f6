"""The files that a build sees, of whatever kind, each with its SHA-256. Pure apart from reading the project's files."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Literal

import uv
from packaging.utils import canonicalize_name

from sparkpin.core.files import sha256_file
from sparkpin.pins.mods import CarriedTemplate, Mod
from sparkpin.pins.schema import LINKS, USER, LockedFile, Stack

UV = "tools/uv"
PASSWD, GROUP = "sparkpin:*:10001:10001:sparkpin:/home/sparkpin:/bin/sh", "sparkpin:*:10001:"


@dataclass(frozen=True)
class ContextFile:
    """One file that a build sees. A mod stands for its wheel: `sha256` is its sources' key, `size` their bytes.

    identity: stands for the file in keys, where machines have different files that do the same.
    source: "store" (a locked wheel), "host" (a file of this machine, `origin`), "text" (`text`), "mod", or "kept" (of
    an earlier build, by its SHA-256 alone). what: what a person calls it, with its version.
    """

    path: str
    sha256: str
    size: int
    source: Literal["store", "host", "text", "mod", "kept"]
    what: str = ""
    executable: bool = False
    text: str = field(default="", repr=False)
    origin: Path | None = None
    locked: LockedFile | None = None
    identity: str = ""
    mod: Mod | None = None


def wheel_files(layer: str, wheels: Sequence[LockedFile]) -> list[ContextFile]:
    files = [
        ContextFile(
            f"wheels/{layer}/{Path(w.file).name}",
            w.sha256,
            w.size,
            "store",
            f"wheel {canonicalize_name(w.name)} {w.version}",
            locked=w,
        )
        for w in wheels
    ]
    text = "".join(f"{canonicalize_name(w.name)}=={w.version} --hash=sha256:{w.sha256}\n" for w in wheels)
    return [*files, text_file(f"wheels/{layer}/requirements.txt", text)]


def user_files() -> list[ContextFile]:
    """The images' user where no root file system of ours brings it (rootfs.sh has the same lines)."""
    return [
        text_file(f"wheels/{USER}/requirements.txt", ""),
        text_file(f"wheels/{USER}/passwd", f"{PASSWD}\n", "the images' user"),
        text_file(f"wheels/{USER}/group", f"{GROUP}\n", "the images' group"),
    ]


def link_files(stack: Stack) -> list[ContextFile]:
    links = json.dumps(stack.image.links, indent=1, sort_keys=True)
    return [
        text_file(f"wheels/{LINKS}/requirements.txt", ""),
        text_file(f"wheels/{LINKS}/links.json", f"{links}\n", "list of links"),
    ]


def mod_file(layer: str, mod: Mod) -> ContextFile:
    return ContextFile(f"wheels/{layer}/{mod.name}", mod.key, mod.size, "mod", f"mod {mod.name} {mod.version}", mod=mod)


def template_file(project: Path, template: CarriedTemplate) -> ContextFile:
    path = f"templates/{template.mod}/{template.called}"
    return host_file(path, project / template.file, f"chat template {template.mod}")


def text_file(path: str, text: str, what: str = "list of wheels") -> ContextFile:
    data = text.encode()
    return ContextFile(path, hashlib.sha256(data).hexdigest(), len(data), "text", what, text=text)


def script_file(project: Path, name: str) -> ContextFile:
    return host_file(f"tools/{name}", project / "dockerfiles" / name, f"sparkpin {name}")


def uv_file() -> ContextFile:
    """This machine's. Each architecture has a binary of its own, and what it installs is the same."""
    version = f"uv {importlib.metadata.version('uv')}"
    return replace(host_file(UV, Path(uv.find_uv_bin()), version, executable=True), identity=version)


def host_file(path: str, origin: Path, what: str, *, executable: bool = False) -> ContextFile:
    status = origin.stat()
    sha256, size = hashed(origin, status.st_mtime_ns, status.st_size)
    return ContextFile(path, sha256, size, "host", what, executable=executable, origin=origin)


@cache
def hashed(path: Path, mtime_ns: int, size: int) -> tuple[str, int]:
    return sha256_file(path)
