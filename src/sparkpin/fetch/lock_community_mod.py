"""`invoke lock --mod`: bring a community mod here as its pin says, and write down what came. Network."""

from __future__ import annotations

import contextlib
import tarfile
import tempfile
from pathlib import Path

from sparkpin.core.errors import InputError, ManifestError
from sparkpin.core.files import atomic_file, disk_errors, sha256_file, write_json
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import Say
from sparkpin.fetch import git
from sparkpin.fetch.store import check
from sparkpin.pins import manifests
from sparkpin.pins.community_mods import FOLDER, PINS, RUN
from sparkpin.pins.schema import CommunityLock, CommunityPin, LockedFile


def lock_mod(paths: Paths, name: str, say: Say) -> CommunityLock:
    """Write `community/<name>.tar`, or .jinja of a chat template, and its lock where there is none for this pin.

    Where there is one, the file must be what the lock says: the same command brings a locked mod back.

    Raises:
        NetworkError, HostError: the repository is out of reach, git is missing.
        ManifestError: the commit has no such folder, or no run.sh in it; a template is not the one that is pinned.
        InputError: the project itself holds it.
        IntegrityError: not what was locked.
    """
    pin = manifests.load_community(paths.project, name)
    if pin.git is None:
        raise InputError(f"{PINS}/{name}.jinja is a file of this project", next_step="there is nothing to lock")
    lock_file = paths.project / f"{PINS}/{name}.lock"
    target = paths.project / FOLDER / f"{name}{'.jinja' if pin.template else '.tar'}"
    known = former(paths.project, pin)
    with disk_errors(target.parent):
        target.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=target.parent) as folder:
            commit = known.archive.version if known else git.commit_of(pin.git)
            say(f"community mod {name}: {pin.git.repository} at {commit}")
            whole, part = Path(folder, "whole.tar"), Path(folder, "part")
            git.archive(pin.git, commit, whole)
            (take_template if pin.template else take)(whole, pin, part)
            sha256, size = sha256_file(part)
            if pin.template and pin.template.sha256 not in ("", sha256):
                wanted = f"{sha256}, of {pin.folder}/{pin.template.file} in {pin.git.repository} at {commit}"
                raise ManifestError(f"{PINS}/{name}.yaml", "template.sha256", pin.template.sha256, wanted)
            locked = LockedFile(name=name, version=commit, file=target.name, size=size, sha256=sha256)
            if known:
                step = f"nothing was changed; if that is what is meant: rm {lock_file}, and again"
                check(known.archive, sha256, size, f"{pin.git.repository} at {commit}, {pin.folder}", step)
            with atomic_file(target) as out:
                out.write(part.read_bytes())
    made = CommunityLock(mod=name, inputs=manifests.community_inputs(pin), archive=locked)
    if known is None:
        write_json(lock_file, made.model_dump(mode="json"))
    return made


def former(project: Path, pin: CommunityPin) -> CommunityLock | None:
    """The lock, if it is of this pin."""
    try:
        return manifests.load_community_lock(project, pin)
    except ManifestError:
        return None


def take(whole: Path, pin: CommunityPin, target: Path) -> None:
    """The mod's folder of a repository's archive, as an archive of its own."""
    start, found = f"{pin.folder}/", False
    with tarfile.open(whole) as source, tarfile.open(target, "w", format=tarfile.GNU_FORMAT) as out:
        for member in source:
            if not member.name.startswith(start):
                continue
            data = source.extractfile(member) if member.isfile() else None
            member.name = member.name.removeprefix(start)
            found = found or member.name == RUN
            out.addfile(member, data)
    if not found:
        raise lacking(pin, "folder", pin.folder, f"with a {RUN}")


def take_template(whole: Path, pin: CommunityPin, target: Path) -> None:
    assert pin.template is not None
    with tarfile.open(whole) as source, contextlib.suppress(KeyError):
        if data := source.extractfile(f"{pin.folder}/{pin.template.file}"):
            target.write_bytes(data.read())
            return
    raise lacking(pin, "template.file", pin.template.file, f"{pin.folder}/ with that file")


def lacking(pin: CommunityPin, key: str, seen: str, wanted: str) -> ManifestError:
    of = pin.git.repository if pin.git else ""
    return ManifestError(f"{PINS}/{pin.name}.yaml", key, seen, f"a folder of {of} {wanted}")
