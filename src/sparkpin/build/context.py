"""The files that a build sees, each with its SHA-256, and the folder in which the builder finds them."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import uv
from packaging.utils import canonicalize_name

from sparkpin.build.record import LOCKED, BuildInput, ContextFile, RenderedImage
from sparkpin.core.errors import HostError, IntegrityError
from sparkpin.core.files import EPOCH, sha256_file
from sparkpin.host.machine import this_platform
from sparkpin.pins.mods import CarriedTemplate, Mod, build_wheel
from sparkpin.pins.schema import LINKS, LockedFile, Stack
from sparkpin.releases.kept_inputs import KeptInputs

UV = "tools/uv"
REQUIREMENTS = "requirements.txt"


def wheel_files(layer: str, wheels: Sequence[LockedFile]) -> list[ContextFile]:
    files, lines = list[ContextFile](), ""
    for one in wheels:
        name, path = canonicalize_name(one.name), f"wheels/{layer}/{Path(one.file).name}"
        files.append(ContextFile(path, one.sha256, one.size, f"{LOCKED}{name} {one.version}", one))
        lines += f"{name}=={one.version} --hash=sha256:{one.sha256}\n"
    return [*files, text_file(f"wheels/{layer}/{REQUIREMENTS}", lines)]


def link_files(stack: Stack) -> list[ContextFile]:
    links = json.dumps(stack.image.links, indent=1, sort_keys=True) + "\n"
    folder = f"wheels/{LINKS}"
    return [text_file(f"{folder}/{REQUIREMENTS}", ""), text_file(f"{folder}/links.json", links, "list of links")]


def mod_file(layer: str, mod: Mod) -> ContextFile:
    return ContextFile(f"wheels/{layer}/{mod.name}", mod.key, mod.size, f"mod {mod.name} {mod.version}", mod)


def template_file(project: Path, template: CarriedTemplate) -> ContextFile:
    path = f"templates/{template.mod}/{template.called}"
    return host_file(path, project / template.file, f"chat template {template.mod}")


def text_file(path: str, text: str, what: str = "list of wheels") -> ContextFile:
    data = text.encode()
    return ContextFile(path, hashlib.sha256(data).hexdigest(), len(data), what, text)


def script_file(project: Path, name: str) -> ContextFile:
    return host_file(f"tools/{name}", project / "dockerfiles" / name, f"sparkpin {name}")


def uv_file() -> ContextFile:
    """This machine's. Each architecture has a binary of its own, and what it installs is the same: its version stands
    for it, and its 38 MB are hashed when they are used."""
    binary, version = Path(uv.find_uv_bin()), f"uv {importlib.metadata.version('uv')}"
    return ContextFile(UV, "", binary.stat().st_size, version, binary, executable=True, identity=version)


def require_own_uv(image: RenderedImage, machine: str) -> None:
    """HostError where the engine's machine (its platform) is none for this machine's uv, which the steps run."""
    here = this_platform()
    if machine != here and any(file.path == UV and isinstance(file.source, Path) for file in image.context):
        cause = f"{image.ref}: its steps run uv, which is here for {here}, and the engine's machine is {machine}"
        step = f"the same command on that machine, or with an engine on {here} (DOCKER_HOST, docker context)"
        raise HostError(cause, next_step=step)


def host_file(path: str, origin: Path, what: str) -> ContextFile:
    sha256, size = sha256_file(origin)
    return ContextFile(path, sha256, size, what, origin)


def fill(folder: Path, inputs: KeptInputs, rendered: RenderedImage) -> list[BuildInput]:
    """Make the folder that the builder sees. Its files, but the Dockerfile, for the record; what no lock names of them
    is kept for later builds. IntegrityError for a file that is not what was rendered."""
    folder.mkdir()
    (folder / "Dockerfile").write_text(rendered.dockerfile, encoding="utf-8")
    date(folder / "Dockerfile")
    rows, lists = list[BuildInput](), dict[str, str]()
    for file in rendered.context:
        rows.append(put(folder, inputs, file))
        if isinstance(mod := file.source, Mod):  # its requirement has the hash of its wheel, which is known only now
            name = f"{Path(file.path).parent}/{REQUIREMENTS}"
            line = f"{mod.distribution}=={mod.version} --hash=sha256:{rows[-1].sha256}\n"
            lists[name] = lists.get(name, "") + line
    rows += [put(folder, inputs, text_file(name, text)) for name, text in lists.items()]
    return sorted(rows, key=lambda file: file.path)


def put(folder: Path, inputs: KeptInputs, file: ContextFile) -> BuildInput:
    """Let the folder have a file, which is kept unless a lock names it."""
    target, source = folder / file.path, file.source
    target.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(source, Mod):
        target = build_wheel(source, target.parent)
    elif isinstance(source, LockedFile) and not file.executable:
        inputs.holding(source).link(source, target)
    elif isinstance(source, str):
        target.write_text(source, encoding="utf-8")
    else:  # a link into a store would share its mode
        shutil.copyfile(inputs.holding(source).verified(source) if isinstance(source, LockedFile) else source, target)
        target.chmod(0o755 if file.executable else 0o644)
    # Gigabytes of wheels were hashed when they were linked.
    sha256 = date(target, source.sha256 if isinstance(source, LockedFile) else "")
    size = target.stat().st_size
    if file.sha256 not in ("", sha256) and not isinstance(source, Mod):
        cause = f"{source}: got sha256={sha256}, expected {file.sha256}, as it was read before"
        raise IntegrityError(cause, next_step="it changed in between: the same command again")
    if not isinstance(source, LockedFile):
        inputs.add(target, sha256, size)
    return row(replace(file, path=target.relative_to(folder).as_posix(), sha256=sha256, size=size))


def row(file: ContextFile) -> BuildInput:
    return BuildInput(path=file.path, sha256=file.sha256, size=file.size, executable=file.executable, what=file.what)


def date(path: Path, sha256: str = "") -> str:
    """Date a file by its content, within two years of EPOCH; gives its SHA-256.

    BuildKit sends a file again when its path, size or mtime is new. With one fixed mtime for all, a changed file of
    equal size (a requirement's next version, a mod's wheel) would not be sent, and the old one would be built.
    """
    sha256 = sha256 or sha256_file(path)[0]
    moment = EPOCH * 10**9 + int(sha256[:14], 16)
    os.utime(path, ns=(moment, moment))
    return sha256
