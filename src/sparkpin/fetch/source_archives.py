"""Locking and fetching what a build from source needs: archives, and packages that the build alone uses. Network.

Archives of repositories are made here, of a commit and always with the same bytes, so that whoever fetches later checks
what he got against the lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from packaging.utils import canonicalize_name

from sparkpin.core.errors import IntegrityError, ManifestError, NetworkError
from sparkpin.core.files import sha256_file
from sparkpin.core.terminal import Say
from sparkpin.fetch import git, transfer
from sparkpin.fetch.pieces import FilePiece
from sparkpin.fetch.pip_settings import indexes
from sparkpin.fetch.store import Store
from sparkpin.fetch.uv_resolver import file_of, index_closure, packages, resolve
from sparkpin.fetch.wheels import CONFIG, WheelTarget, http_client, length, origin_of
from sparkpin.pins.schema import GitTree, LockedFile, SourceBuild, SourceLock, Stack


def lock_source(
    stack: Stack,
    target: WheelTarget,
    debs: Sequence[LockedFile],
    wheels: Sequence[LockedFile],
    all_debs: Sequence[LockedFile],
    folder: Path,
    store: Store,
    file: str,
    say: Say,
) -> SourceLock:
    """debs, wheels: of the images; all_debs: these and those of the build. folder: does not exist yet; archives go to
    the store.
    """
    source = stack.python.source
    assert source
    folder.mkdir()
    own = {deb.name: deb for deb in debs}
    if other := [deb.name for deb in all_debs if own.get(deb.name, deb) != deb]:
        raise NetworkError(f"Debian's mirror changed meanwhile: {', '.join(other)}", next_step="the same command again")
    tools = build_wheels(stack, source, target, wheels, file, say)
    archives = []
    for name, tree in trees(source):
        commit = git.commit_of(tree) if tree else source.version
        say(f"  source {name} {commit}")
        path = make(stack, target, name, tree, commit, folder, say)
        sha256, size = sha256_file(path)
        locked = LockedFile(name=name, version=commit, file=path.name, size=size, sha256=sha256)
        store.add(path, locked, move=True)
        archives.append(locked)
    return SourceLock(archives=archives, debs=[deb for deb in all_debs if deb.name not in own], wheels=tools)


def trees(source: SourceBuild) -> list[tuple[str, GitTree | None]]:
    """What the archives are of: the source first. None: the index's source distribution."""
    return [(source.name, source.git), *sorted(source.inputs.items())]


def build_wheels(
    stack: Stack, source: SourceBuild, target: WheelTarget, wheels: Sequence[LockedFile], file: str, say: Say
) -> list[LockedFile]:
    """What the build needs beside the images' own wheels, whose versions are given: one torch for both."""
    given = {f"{wheel.name}=={wheel.version}": "of the images" for wheel in wheels}
    python = stack.python.model_copy(
        update={
            "requirements": [*stack.python.requirements, *source.requirements],
            "constraints": {**stack.python.constraints, **given},
        }
    )
    try:
        both = index_closure(stack.model_copy(update={"python": python}), target, (), file, say)
    except ManifestError as error:
        if error.key != "python.requirements":
            raise
        if error.seen != python.requirements:  # one of them has no wheel for the target
            raise ManifestError(file, "python.source.requirements", error.seen, error.wanted) from None
        wanted = f"requirements that fit the versions that the images have; {error.wanted}"
        raise ManifestError(file, "python.source.requirements", source.requirements, wanted) from None
    own = {wheel.name for wheel in wheels} | {canonicalize_name(source.name)}
    return [wheel for wheel in both if wheel.name not in own]


def fetch_archives(
    stack: Stack, target: WheelTarget, wanted: Sequence[LockedFile], folder: Path, store: Store, say: Say
) -> None:
    """Bring archives of the lock into the store. IntegrityError when they are not what was locked."""
    source = stack.python.source
    assert source
    known = dict(trees(source))
    folder.mkdir()
    for file in wanted:
        say(f"  source {file.name} {file.version}")
        path = make(stack, target, file.name, known[file.name], file.version, folder, say)
        try:
            store.add(path, file, move=True)
        except IntegrityError as error:
            step = f"nothing of it was stored; if that is what is meant: invoke lock --stack {stack.name}"
            raise IntegrityError(error.message, next_step=step) from None


def make(
    stack: Stack, target: WheelTarget, name: str, tree: GitTree | None, version: str, folder: Path, say: Say
) -> Path:
    if tree is None:
        return source_distribution(stack, target, f"{name}=={version}", folder, say)
    path = folder / f"{name}-{version[:12]}.tar"
    git.archive(tree, version, path)
    return path


def source_distribution(stack: Stack, target: WheelTarget, requirement: str, folder: Path, say: Say) -> Path:
    """The index's own archive of a release, checked against the hash that the index tells. ManifestError for one of
    another form than .tar.gz, which the build could not read.
    """
    env = indexes()
    done = resolve(
        stack.python.torch_backend, target, [requirement], env, "--no-deps", as_of=stack.python.as_of, only_binary=False
    )
    if done.returncode:
        raise NetworkError(f"uv does not find {requirement}:\n{done.stderr.strip()}", next_step=CONFIG)
    found = [row["sdist"] for row in packages(done) if "sdist" in row]
    if not found:
        raise NetworkError(f"the index has no source distribution of {requirement}", next_step=CONFIG)
    url, path = found[0]["url"], folder / file_of(found[0]["url"])
    if not path.name.endswith(".tar.gz"):
        wanted = "a release whose source distribution is a .tar.gz (PEP 625), or its repository in python.source.git"
        raise ManifestError(f"pins/stacks/{stack.name}.yaml", "python.source.version", path.name, wanted)
    with http_client(env) as client:
        size, sha256 = length(url, client), found[0]["hashes"].get("sha256", "")
        origin, part = origin_of(url, path.name, client, lambda: CONFIG), path.with_suffix(".part")
        piece = FilePiece(origin, path.name, size, 0, size, path.name, part, lambda _: path, sha256)
        transfer.fetch([piece], say, title=path.name, advice=CONFIG)
    return path
