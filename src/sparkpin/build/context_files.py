"""The files that a build sees, of whatever kind, each with its SHA-256. Pure apart from reading the project's files."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Literal

import uv

from sparkpin.core.files import sha256_file
from sparkpin.pins import source_builds
from sparkpin.pins.community_mods import RunMod
from sparkpin.pins.mods import Mod
from sparkpin.pins.patches import name_of
from sparkpin.pins.schema import LockedFile, Stack, StackLock
from sparkpin.pins.wheel_layers import LINKS, SOURCE_WHEELS, UPDATES, USER, normal, updated

UV = "tools/uv"
PASSWD, GROUP = "sparkpin:*:10001:10001:sparkpin:/home/sparkpin:/bin/sh", "sparkpin:*:10001:"
HIDDEN = "(hidden)"  # at the end of what a wheel is called that a layer above hides


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


def wheel_files(layer: str, wheels: Sequence[LockedFile], hidden: Sequence[LockedFile] = ()) -> list[ContextFile]:
    """hidden: wheels that a layer above hides."""
    files = [
        ContextFile(
            f"wheels/{layer}/{Path(w.file).name}",
            w.sha256,
            w.size,
            "store",
            f"wheel {normal(w.name)} {w.version}{f' {HIDDEN}' if w in hidden else ''}",
            locked=w,
        )
        for w in wheels
    ]
    return [*files, requirements_file(f"wheels/{layer}/requirements.txt", wheels)]


def requirements_file(path: str, wheels: Sequence[LockedFile]) -> ContextFile:
    return text_file(path, "".join(f"{normal(w.name)}=={w.version} --hash=sha256:{w.sha256}\n" for w in wheels))


def update_files(stack_lock: StackLock, groups: Mapping[str, Sequence[LockedFile]]) -> list[ContextFile]:
    """Beside its wheels, the layer gets to know what lies in those below it: which wheels it hides, and which stay."""
    stay = [
        f"{wheel.sha256}  {name}/{Path(wheel.file).name}\n"
        for name, wheels in groups.items()
        for wheel in wheels
        if wheel not in stack_lock.underlay
    ]
    return [
        *wheel_files(UPDATES, updated(stack_lock)),
        requirements_file(f"wheels/{UPDATES}/hidden.txt", stack_lock.underlay),
        text_file(f"wheels/{UPDATES}/kept.txt", "".join(stay)),
    ]


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


def source_files(project: Path, stack: Stack, stack_lock: StackLock) -> list[ContextFile]:
    files = [
        ContextFile(path, file.sha256, file.size, "store", source_builds.called(file), locked=file)
        for path, file in source_builds.places(stack_lock)
    ]
    for number, patch in enumerate(stack.patches):
        name = name_of(number, patch)
        files.append(host_file(f"{source_builds.FOLDER}/patches/{name}", project / patch.file, f"patch {patch.file}"))
    script = project / "dockerfiles/source.py"
    return [
        *files,
        host_file(f"{source_builds.FOLDER}/build.py", script, f"sparkpin {script.name}"),
        text_file(
            f"{source_builds.FOLDER}/build.json",
            source_builds.build_plan(stack, stack_lock),
            "plan of a build from source",
        ),
    ]


def source_wheel_files(stack_lock: StackLock) -> list[ContextFile]:
    assert stack_lock.source
    wheels = stack_lock.source.wheels
    return [
        replace(file, what=source_builds.called(file.locked)) if file.locked else file
        for file in wheel_files(SOURCE_WHEELS, wheels)
    ]


def mod_file(layer: str, mod: Mod) -> ContextFile:
    return ContextFile(f"wheels/{layer}/{mod.name}", mod.key, mod.size, "mod", f"mod {mod.name} {mod.version}", mod=mod)


def run_mod_files(project: Path, mod: RunMod) -> list[ContextFile]:
    return [
        host_file(f"runmods/{mod.name}/{below}", project / path, f"community mod {mod.name}", executable=may)
        for below, path, may in mod.files
    ]


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
