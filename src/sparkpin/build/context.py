"""The files that a build sees, each with its SHA-256, and the folder in which the builder finds them."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import uv
from packaging.utils import canonicalize_name

from sparkpin.build.record import LOCKED, BuildInput, ContextFile, RenderedImage
from sparkpin.core.errors import IntegrityError
from sparkpin.core.files import EPOCH, disk_errors, sha256_file
from sparkpin.core.paths import Paths
from sparkpin.pins.mods import CarriedTemplate, Mod, build_wheel
from sparkpin.pins.schema import LINKS, LockedFile, Stack
from sparkpin.releases.kept_inputs import KeptInputs

UV = "tools/uv"
REQUIREMENTS = "requirements.txt"


def wheel_files(layer: str, wheels: Sequence[LockedFile]) -> list[ContextFile]:
    names = {wheel.sha256: f"{canonicalize_name(wheel.name)} {wheel.version}" for wheel in wheels}
    lines = [f"{names[one.sha256].replace(' ', '==')} --hash=sha256:{one.sha256}\n" for one in wheels]
    files = [
        ContextFile(f"wheels/{layer}/{Path(one.file).name}", one.sha256, one.size, f"{LOCKED}{names[one.sha256]}", one)
        for one in wheels
    ]
    return [*files, text_file(f"wheels/{layer}/{REQUIREMENTS}", "".join(lines))]


def link_files(stack: Stack) -> list[ContextFile]:
    links = json.dumps(stack.image.links, indent=1, sort_keys=True)
    return [
        text_file(f"wheels/{LINKS}/{REQUIREMENTS}", ""),
        text_file(f"wheels/{LINKS}/links.json", f"{links}\n", "list of links"),
    ]


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


def host_file(path: str, origin: Path, what: str) -> ContextFile:
    sha256, size = sha256_file(origin)
    return ContextFile(path, sha256, size, what, origin)


@contextlib.contextmanager
def context_folder(paths: Paths, rendered: RenderedImage) -> Iterator[tuple[Path, list[BuildInput]]]:
    """What the builder sees, for as long as the `with` block runs; and its files, but the Dockerfile, for the record.

    What no lock names of them is kept for later builds.
    """
    prefix = f"context-{rendered.key[:12]}-"
    with disk_errors(paths.work):
        paths.work.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=prefix, dir=paths.work) as name:
            yield Path(name), fill(Path(name), KeptInputs.of(paths), rendered)


def fill(folder: Path, inputs: KeptInputs, rendered: RenderedImage) -> list[BuildInput]:
    """IntegrityError for a file that is not what was rendered."""
    rows, lists = list[BuildInput](), dict[str, str]()
    (folder / "Dockerfile").write_text(rendered.dockerfile, encoding="utf-8")
    date(folder / "Dockerfile")
    for file in rendered.context:
        target = folder / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(file.source, LockedFile):
            put_locked(target, inputs, file.source, executable=file.executable)
            rows.append(row(file))
            continue
        if isinstance(file.source, Mod):
            target = build_wheel(file.source, target.parent)
        elif isinstance(file.source, Path):
            shutil.copyfile(file.source, target)
            target.chmod(0o755 if file.executable else 0o644)
        else:
            target.write_text(file.source, encoding="utf-8")
        rows.append(keep(folder, inputs, replace(file, path=target.relative_to(folder).as_posix())))
        if isinstance(mod := file.source, Mod):  # its requirement has the hash of its wheel, which is known only now
            name = f"{Path(file.path).parent}/{REQUIREMENTS}"
            line = f"{mod.distribution}=={mod.version} --hash=sha256:{rows[-1].sha256}\n"
            lists[name] = lists.get(name, "") + line
        elif file.sha256 not in ("", rows[-1].sha256):
            raise IntegrityError(
                f"{file.source}: got sha256={rows[-1].sha256}, expected {file.sha256}, as it was read before",
                next_step="it changed in between: the same command again",
            )
    for name, text in lists.items():
        (folder / name).write_text(text, encoding="utf-8")
        rows.append(keep(folder, inputs, text_file(name, text)))
    return sorted(rows, key=lambda file: file.path)


def row(file: ContextFile) -> BuildInput:
    return BuildInput(path=file.path, sha256=file.sha256, size=file.size, executable=file.executable, what=file.what)


def keep(folder: Path, inputs: KeptInputs, file: ContextFile) -> BuildInput:
    """Of a file that lies in the folder."""
    target = folder / file.path
    sha256, size = date(target), target.stat().st_size
    inputs.keep(target, sha256, size)
    return row(replace(file, sha256=sha256, size=size))


def put_locked(target: Path, inputs: KeptInputs, file: LockedFile, *, executable: bool) -> None:
    """A hard link into the store, unless it has a mode of its own, which a link would share."""
    if executable:
        shutil.copyfile(inputs.holding(file).verified(file), target)
        target.chmod(0o755)
    else:
        inputs.holding(file).link(file, target)
    date(target, file.sha256)


def date(path: Path, sha256: str = "") -> str:
    """Date a file by its content, within two years of EPOCH; gives its SHA-256.

    BuildKit sends a file again when its path, size or mtime is new. With one fixed mtime for all, a changed file of
    equal size (a requirement's next version, a mod's wheel) would not be sent, and the old one would be built.
    """
    sha256 = sha256 or sha256_file(path)[0]
    moment = EPOCH * 10**9 + int(sha256[:14], 16)
    os.utime(path, ns=(moment, moment))
    return sha256
