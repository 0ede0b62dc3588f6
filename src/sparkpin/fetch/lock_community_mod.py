"""`invoke lock --mod`: bring a community mod here as its pin says, and write down what came. Network."""

from __future__ import annotations

import tarfile
import tempfile
from pathlib import Path

from sparkpin.core.errors import ManifestError
from sparkpin.core.files import atomic_file, disk_errors, sha256_file, write_json
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import Say
from sparkpin.fetch import git
from sparkpin.fetch.store import check
from sparkpin.pins import manifests
from sparkpin.pins.community_mods import FOLDER, PINS, RUN
from sparkpin.pins.schema import CommunityLock, CommunityPin, LockedFile


def lock_mod(paths: Paths, name: str, say: Say) -> CommunityLock:
    """Write `community/<name>.tar`, and its lock where there is none for this pin.

    Where there is one, the tar must be what the lock says: the same command brings a locked mod back.

    Raises:
        NetworkError, HostError: the repository is out of reach, git is missing.
        ManifestError: the commit has no such folder, or no run.sh in it.
        IntegrityError: not what was locked.
    """
    pin = manifests.load_community(paths.project, name)
    lock_file, target = paths.project / f"{PINS}/{name}.lock", paths.project / FOLDER / f"{name}.tar"
    known = former(paths.project, pin)
    with disk_errors(target.parent):
        target.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=target.parent) as folder:
            commit = known.archive.version if known else git.commit_of(pin.git)
            say(f"community mod {name}: {pin.git.repository} at {commit}")
            whole, part = Path(folder, "whole.tar"), Path(folder, "part.tar")
            git.archive(pin.git, commit, whole)
            take(whole, pin, part)
            sha256, size = sha256_file(part)
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
        file = f"{PINS}/{pin.name}.yaml"
        raise ManifestError(file, "folder", pin.folder, f"a folder of {pin.git.repository} with a {RUN}")
