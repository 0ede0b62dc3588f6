"""Mods: what of a folder of mods/ counts, and the wheel that flit_core makes of that; and the community's.

A mod of the community is a folder with a run.sh, which edits what is installed. None is run here (docs/mods.md): what a
recipe names is known as needless for the stack's vLLM, or a chat template (one file, known by its SHA-256), or refused.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from sparkpin.core.errors import WHOLE, BuildError, IntegrityError, ManifestError
from sparkpin.core.files import EPOCH, disk_errors, sha256_file
from sparkpin.core.names import is_plain
from sparkpin.pins.manifests import COMMUNITY_MODS, load_community_mods
from sparkpin.pins.schema import ChatTemplate, CommunityMod, is_within
from sparkpin.pins.vllm_flags import flag_value, set_flag

# None of these changes what runs in an image. The wheel is built from a copy without them, so that they cannot.
LEFT_OUT_FOLDERS = frozenset({"tests", "benchmarks", "docs", "build", "dist"})  # of the mod's folder itself
LEFT_OUT_SUFFIXES = (".pyc", ".md")
KERNELS = "sparkpin.kernels"  # group of entry points: functions that compile a mod's kernels
BACKEND = "flit_core.buildapi"
HOOK = f"import sys, {BACKEND} as backend; print(backend.build_wheel(sys.argv[1]))"
ENV = {  # of a backend, and nothing of the caller's, which might change its bytes or its modules
    "SOURCE_DATE_EPOCH": str(EPOCH),
    "LC_ALL": "C.UTF-8",
    "PATH": "/usr/bin:/bin",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
}
TEMPLATES = "pins/chat_templates"
WORKSPACE = "/workspace"  # where the community's runner starts vllm, so that a command's paths are relative to it


@dataclass(frozen=True)
class ModFile:
    """path: in the mod's folder; sha256: hex."""

    path: str
    sha256: str
    is_executable: bool


@dataclass(frozen=True)
class Mod:
    """name: the folder in mods/; distribution, version: of its wheel.

    files: all that counts, size: their bytes; key: over those and the backend's version.
    kernels: it has an entry point that compiles its GPU kernels ahead (mods/modkit, `sparkpin_modkit.ahead`).
    """

    name: str
    folder: Path
    distribution: str
    version: str
    readme: str
    files: tuple[ModFile, ...]
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
        raise ManifestError(pyproject, "(whole file)", str(error), "TOML") from None
    table, system = value.get("project", {}), value.get("build-system", {})
    for key in ("name", "version"):
        if not isinstance(table.get(key), str):
            raise ManifestError(pyproject, f"project.{key}", table.get(key), "text, since a key must need no build")
    if (backend := system.get("build-backend")) != BACKEND or "backend-path" in system:
        raise ManifestError(pyproject, "build-system.build-backend", backend, f"{BACKEND}, the host's own")
    points = table.get("entry-points", {}).get(KERNELS, {})
    if list(points) not in ([], [name]):
        raise ManifestError(pyproject, f'project.entry-points."{KERNELS}"', list(points), f"the mod's name, {name}")
    files, readme = read_files(folder), table.get("readme", "")
    # The backend writes its version into the wheel.
    identity = [BACKEND, importlib.metadata.version("flit_core"), [astuple(file) for file in files]]
    return Mod(
        name=name,
        folder=folder,
        distribution=table["name"],
        version=table["version"],
        readme=readme if isinstance(readme, str) else readme.get("file", ""),
        files=files,
        size=sum((folder / file.path).stat().st_size for file in files),
        key=hashlib.sha256(json.dumps(identity).encode()).hexdigest(),
        kernels=bool(points),
    )


def read_files(folder: Path) -> tuple[ModFile, ...]:
    """The files of a mod that count, by path."""
    files = []
    for path in folder.rglob("*"):
        below = path.relative_to(folder)
        if not path.is_file() or not counts(below):
            continue
        if not is_plain(below.as_posix()):
            raise ManifestError(folder, "file name", below.as_posix(), "one that can be printed, without backslash")
        files.append(ModFile(below.as_posix(), sha256_file(path)[0], bool(path.stat().st_mode & 0o100)))
    return tuple(sorted(files, key=lambda file: file.path))


def counts(path: Path) -> bool:
    """path: in the mod's folder. A package below it may have any name, `docs` and `build` included."""
    aside = path.parts[0] in LEFT_OUT_FOLDERS and len(path.parts) > 1
    hidden = any(part.startswith(".") or part == "__pycache__" for part in path.parts)
    return not (hidden or aside or path.name.endswith(LEFT_OUT_SUFFIXES))


def build_wheel(mod: Mod, folder: Path) -> Path:
    """Build the mod's wheel into `folder`, from a copy of the files that count and an empty README.

    The backend is the host's: -P keeps a module of the mod that has its name from being run in its place.
    """
    with disk_errors(folder.parent), tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{mod.name}-") as name:
        source = Path(name)
        for file in mod.files:
            target, origin = source / file.path, mod.folder / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(origin, target)
            target.chmod(0o755 if file.is_executable else 0o644)
            if sha256_file(target)[0] != file.sha256:
                raise BuildError(f"{origin} changed while it was read", next_step="the same command again")
        if mod.readme:
            (source / mod.readme).touch()
        done = subprocess.run(
            [sys.executable, "-P", "-c", HOOK, str(folder.absolute())],
            cwd=source,
            env=ENV,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode != 0:
        raise BuildError(
            f"{BACKEND} made no wheel of {mod.folder}:\n{done.stderr.strip()[-2000:]}",
            next_step=f"correct {mod.folder / 'pyproject.toml'} or the module that it names",
        )
    return folder / done.stdout.split()[-1]


@dataclass(frozen=True)
class CarriedTemplate:
    """A chat template that images get, in a layer of its own. mod: whose name it has here; called: its file there."""

    mod: str
    called: str

    @property
    def file(self) -> str:
        """Below the project."""
        return f"{TEMPLATES}/{self.mod}.jinja"


def mod_of(name: str) -> str:
    """The name of a mod that a recipe gives by its path or its archive."""
    return name.rstrip("/").rpartition("/")[2].removesuffix(".zip").lower()


def is_needless(mod: CommunityMod, vllm: str) -> bool:
    """vllm: a version; "" fits no bounds."""
    return vllm != "" and mod.needless is not None and is_within(mod.needless, vllm)


def read_templates(project: Path, names: Sequence[str], file: str, vllm: str) -> tuple[CarriedTemplate, ...]:
    """The templates of a recipe's `mods`, each verified. file: the recipe's; vllm: version of the stack's.

    ManifestError for a mod that is no template, and for a template that nobody has fetched.
    """
    known = load_community_mods(project)
    if len({mod_of(name) for name in names}) < len(names):
        raise ManifestError(file, "mods", list(names), "each mod once")
    found = []
    for name in names:
        mod = known.get(mod_of(name))
        if mod is None or mod.template is None:
            expected = counterpart(mod, vllm) if mod else f"a chat template of {COMMUNITY_MODS}; no run.sh is run here"
            raise ManifestError(file, "mods", name, expected, next_step=f"take it out of `mods` of {file}")
        one, template = CarriedTemplate(mod.name, mod.template.name), mod.template
        if not (path := project / one.file).is_file():
            step = fetch_command(one.file, template) or f"git restore {one.file}"
            raise ManifestError(one.file, WHOLE, "no such file", "the chat template, not here yet", next_step=step)
        if (sha256 := sha256_file(path)[0]) != template.sha256:
            step = f"restore it, or, if the change is intended, write the new SHA-256 into {COMMUNITY_MODS}"
            raise IntegrityError(f"{path}: got sha256={sha256}, expected {template.sha256}", next_step=step)
        found.append(one)
    return tuple(found)


def counterpart(mod: CommunityMod, vllm: str) -> str:
    """What has the place of a mod that is no template."""
    if is_needless(mod, vllm):
        return f"no such mod, which vLLM {vllm} does not need ({mod.reason})"
    return f"{mod.instead or f'vLLM {mod.needless}, which does not need it'} ({mod.reason})"


def fetch_command(file: str, template: ChatTemplate) -> str:
    return f"curl -fL --create-dirs -o {file} {template.url}" if template.url else ""


def to_fetch(project: Path, names: Sequence[str]) -> list[str]:
    """A command for each chat template of `mods` that is not here yet."""
    found = {CarriedTemplate(mod_of(name), "").file: one for name, one in templates_of(project, names).items()}
    return [fetch_command(file, one) for file, one in found.items() if one.url and not (project / file).is_file()]


def templates_of(project: Path, names: Sequence[str]) -> dict[str, ChatTemplate]:
    """Mod -> its chat template, of those that are one. Nothing need be fetched."""
    known = load_community_mods(project)
    return {name: mod.template for name in names if (mod := known.get(mod_of(name))) and mod.template}


def template_names(project: Path, names: Sequence[str]) -> frozenset[str]:
    """What --chat-template may call those of `mods`."""
    return frozenset(template.name for template in templates_of(project, names).values())


def in_workspace(argv: Sequence[str]) -> list[str]:
    """A command line whose chat template is found where the images have it."""
    path = flag_value(argv, "--chat-template") or ""
    if not path.endswith(".jinja") or path.startswith("/"):
        return list(argv)
    return set_flag(argv, "--chat-template", f"{WORKSPACE}/{path.removeprefix('./')}")
