"""Mods as wheels: what of a mod's folder counts, and the wheel that its own build backend makes of that."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

from sparkpin.core.epoch import EPOCH
from sparkpin.core.errors import BuildError, HostError, ManifestError
from sparkpin.core.files import disk_errors, sha256_file
from sparkpin.core.names import is_plain

# None of these changes what runs in an image. The wheel is built from a copy without them, so that they cannot.
LEFT_OUT_FOLDERS = frozenset({"tests", "benchmarks", "docs", "build", "dist", "__pycache__"})
LEFT_OUT_SUFFIXES = (".pyc", ".md")
KERNELS = "sparkpin.kernels"  # group of entry points: functions that compile a mod's kernels
HOOK = "import importlib, sys; print(importlib.import_module(sys.argv[1]).build_wheel(sys.argv[2]))"

ENV = {  # of a backend, and nothing of the caller's, which might change its bytes or its modules
    "SOURCE_DATE_EPOCH": str(EPOCH),
    "LC_ALL": "C.UTF-8",
    "PATH": "/usr/bin:/bin",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
}


@dataclass(frozen=True)
class Mod:
    """name: the folder in mods/; distribution, version: of its wheel; backend: its PEP 517 backend, a module's name.

    files: (path in the folder, sha256, executable) of all that counts; key: over those and the backend's version.
    kernels: it has an entry point that compiles its GPU kernels ahead (mods/modkit, `sparkpin_modkit.ahead`).
    """

    name: str
    folder: Path
    distribution: str
    version: str
    backend: str
    readme: str
    files: tuple[tuple[str, str, bool], ...]
    size: int
    key: str
    kernels: bool = False


def read_mod(project: Path, name: str) -> Mod:
    """Read a mod's folder. ManifestError when its pyproject.toml lacks what a wheel needs."""
    folder = project / "mods" / name
    pyproject = folder / "pyproject.toml"
    try:
        value = tomllib.loads(pyproject.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ManifestError(pyproject, "(whole file)", str(error), "valid TOML") from None
    table, system = value.get("project", {}), value.get("build-system", {})
    for key, found in (("project.name", table.get("name")), ("project.version", table.get("version"))):
        if not isinstance(found, str):
            raise ManifestError(pyproject, key, found, "a text: the build key must not need a build to know it")
    backend = system.get("build-backend")
    if not isinstance(backend, str) or "backend-path" in system:
        raise ManifestError(pyproject, "build-system.build-backend", backend, "a backend of the host's environment")
    readme = table.get("readme", "")
    files, size = [], 0
    for path in sorted(folder.rglob("*")):
        if path.is_file() and counts(path.relative_to(folder)):
            below = path.relative_to(folder).as_posix()
            if not is_plain(below):
                raise ManifestError(folder, "file name", below, "one that can be printed, without backslash")
            digest, length = sha256_file(path)
            files.append((below, digest, bool(path.stat().st_mode & 0o100)))
            size += length
    files.sort()
    points = table.get("entry-points", {}).get(KERNELS, {})
    if list(points) not in ([], [name]):
        raise ManifestError(pyproject, f'project.entry-points."{KERNELS}"', list(points), f"the mod's own name, {name}")
    key = hashlib.sha256(json.dumps([backend, backend_version(backend), files]).encode()).hexdigest()
    return Mod(
        name=name,
        folder=folder,
        distribution=table["name"],
        version=table["version"],
        backend=backend,
        readme=readme if isinstance(readme, str) else readme.get("file", ""),
        files=tuple(files),
        size=size,
        key=key,
        kernels=bool(points),
    )


def counts(path: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.parts)
    return not (hidden or LEFT_OUT_FOLDERS.intersection(path.parts[:-1]) or path.name.endswith(LEFT_OUT_SUFFIXES))


def backend_version(backend: str) -> str:
    """The version of the distribution that holds the backend: it writes itself into the wheel."""
    package = backend.partition(":")[0].partition(".")[0]
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        owners = importlib.metadata.packages_distributions().get(package, [])
    if not owners:
        raise HostError(f"the build backend {backend} is not installed on the host", next_step="./install.sh")
    return importlib.metadata.version(owners[0])


def build_wheel(mod: Mod, folder: Path) -> Path:
    """Build the mod's wheel into `folder`, from a copy of the files that count and an empty README.

    The backend is the host's: -P keeps a module of the mod that has its name from being run in its place.
    """
    with disk_errors(folder.parent), tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{mod.name}-") as name:
        source = Path(name)
        for path, digest, executable in mod.files:
            target = source / path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(mod.folder / path, target)
            target.chmod(0o755 if executable else 0o644)
            if sha256_file(target)[0] != digest:
                raise BuildError(f"{mod.folder / path} changed while it was read", next_step="the same command again")
        if mod.readme:
            (source / mod.readme).touch()
        done = subprocess.run(
            [sys.executable, "-P", "-c", HOOK, mod.backend.partition(":")[0], str(folder.absolute())],
            cwd=source,
            env=ENV,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode != 0:
        raise BuildError(
            f"{mod.backend} made no wheel of {mod.folder}:\n{done.stderr.strip()[-2000:]}",
            next_step=f"mend {mod.folder / 'pyproject.toml'} or the module that it names",
        )
    return folder / done.stdout.split()[-1]
