"""The files of a Git repository at one commit, as a tar: the same bytes wherever it is made. Network."""

from __future__ import annotations

import os
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sparkpin.core.epoch import EPOCH
from sparkpin.core.errors import HostError, IntegrityError, NetworkError
from sparkpin.core.files import disk_errors
from sparkpin.fetch.debs import tail
from sparkpin.pins.schema import UNRESOLVED, GitTree

# What of a user's configuration may stay is how to reach a server; what would change the files may not.
PLAIN = {
    "core.attributesFile": "/dev/null",
    "core.autocrlf": "false",
    "core.eol": "lf",
    "core.fileMode": "true",
    "core.fsmonitor": "false",
    "core.hooksPath": "/dev/null",
    "core.symlinks": "true",
}
ONLINE = "look at the network and at the repository's address, then run the command again"


def commit_of(tree: GitTree) -> str:
    """The commit, asked for where only a tag is known."""
    if tree.commit != UNRESOLVED:
        return tree.commit
    name = f"refs/tags/{tree.tag}"
    rows = [line.split("\t") for line in git("ls-remote", tree.repository, name, f"{name}^{{}}").splitlines()]
    found = {ref: commit for commit, ref in rows}
    if not found:
        raise NetworkError(f"{tree.repository} has no tag {tree.tag}", next_step="correct `tag` in the stack's file")
    return found.get(f"{name}^{{}}", found.get(name, ""))  # an annotated tag is an object of its own


def archive(tree: GitTree, commit: str, target: Path) -> None:
    """Write the tar of a commit and its submodules. Scratch files lie beside it meanwhile."""
    with disk_errors(target.parent), tempfile.TemporaryDirectory(prefix="git-", dir=target.parent) as name:
        work = Path(name, "tree")
        git("init", "--quiet", str(work))
        git("remote", "add", "origin", tree.repository, cwd=work)  # submodules may lie beside it
        git("fetch", "--quiet", "--no-tags", "--depth=1", "origin", commit, cwd=work)
        git("checkout", "--quiet", "--detach", "FETCH_HEAD", cwd=work)
        if (seen := git("rev-parse", "HEAD", cwd=work).strip()) != commit:
            raise IntegrityError(f"{tree.repository}: asked for {commit}, got {seen}", next_step=ONLINE)
        git("submodule", "--quiet", "update", "--init", "--recursive", "--depth=1", cwd=work)
        with tarfile.open(target, "w", format=tarfile.GNU_FORMAT) as tar:
            for path in files_below(work):
                add(tar, path, path.relative_to(work).as_posix())


def files_below(root: Path) -> Iterator[Path]:
    """Files and links, sorted; nothing of Git's own. Git knows no empty folders."""
    for path in sorted(root.iterdir()):
        if path.name == ".git":
            continue
        if path.is_dir() and not path.is_symlink():
            yield from files_below(path)
        else:
            yield path


def add(tar: tarfile.TarFile, path: Path, name: str) -> None:
    info = tarfile.TarInfo(name)
    info.mtime = EPOCH
    if path.is_symlink():
        info.type, info.mode, info.linkname = tarfile.SYMTYPE, 0o777, os.readlink(path)
        tar.addfile(info)
        return
    status = path.stat()
    info.size, info.mode = status.st_size, 0o755 if status.st_mode & 0o100 else 0o644
    with path.open("rb") as file:
        tar.addfile(info, file)


def git(*argv: str, cwd: Path | None = None) -> str:
    """What git says. NetworkError when it fails: what it is used for here fails for want of a network or a server."""
    settings = [word for key, value in PLAIN.items() for word in ("-c", f"{key}={value}")]
    env = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "GIT_LFS_SKIP_SMUDGE": "1", "LC_ALL": "C.UTF-8"}
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        env.pop(name, None)
    try:
        done = subprocess.run(["git", *settings, *argv], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise HostError("git is missing", next_step="apt-get install git") from None
    if done.returncode:
        raise NetworkError(f"git {' '.join(argv)} failed:\n{tail(done)}", next_step=ONLINE)
    return done.stdout
