"""Model repositories: locked by hash, fetched with huggingface_hub, used only when every byte is the locked one.

A repository lies in `models/<repo>/<revision>/`. Files arrive in `<revision>.download/` beside it and move over once
their hash is right, so that the folder never holds a wrong or half a file; a killed run loses the file it was at.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from sparkpin import files, manifests
from sparkpin.errors import IntegrityError
from sparkpin.hubclient import Say, download, endpoint, plain_errors, token_for
from sparkpin.paths import Paths
from sparkpin.schema import LockedFile, ModelLock, ModelPin, Repository, RepositoryLock

HASH_WORKERS = min(4, os.cpu_count() or 1)


def lock_model(paths: Paths, name: str, say: Say) -> ModelLock:
    """Resolve every file of a model's repositories and write `pins/models/<name>.lock`.

    Large files' hashes come from the Hub; small files, for which it has none, are downloaded and hashed.
    Raises ManifestError if a generated model's commit is not the pinned one, NetworkError, DiskError.
    """
    pin = manifests.load_model(paths.project, name)
    with hold(paths, pin, say), endpoint(paths, pin, say) as url:
        repositories = {
            key: lock_repository(paths, repository, url, say) for key, repository in pin.repositories.items()
        }
    path = paths.project / f"pins/models/{name}.lock"
    value = {"model": name, "inputs": manifests.model_inputs(pin), "repositories": repositories}
    lock = manifests.parse(ModelLock, value, path, next_step="report this: the Hub has a file name that is not allowed")
    with files.atomic_file(path) as file:
        file.write(manifests.lock_text(lock).encode())
    return lock


def fetch_model(
    paths: Paths, pin: ModelPin, lock: ModelLock, say: Say, *, only: Collection[str] | None = None
) -> dict[str, Path]:
    """Folders of the model's repositories (all, or those named in `only`), each file of the locked size and SHA-256.

    What is there and right costs a hash and no network; a damaged file is told and fetched again. Raises NetworkError,
    DiskError, and IntegrityError if the Hub's bytes are not the locked ones.
    """
    wanted = {name: entry for name, entry in lock.repositories.items() if only is None or name in only}
    folders = {name: repository_folder(paths, entry) for name, entry in wanted.items()}
    with hold(paths, pin, say):
        missing = {name: missing_files(folders[name], entry, say) for name, entry in wanted.items()}
        if any(missing.values()):
            needed = sum(file.size for group in missing.values() for file in group)
            files.require_space(paths.models, needed, "the model's files", "SPARKPIN_CACHE")
            with endpoint(paths, pin, say) as url:
                for name, entry in wanted.items():
                    for file in missing[name]:
                        say(f"fetching {entry.repo} {file.file} ({file.size / 1e6:.1f} MB)")
                        fetch_file(folders[name], entry, file, url, pin.name, say)
        for folder in folders.values():
            shutil.rmtree(download_folder(folder), ignore_errors=True)
    return folders


def repository_folder(paths: Paths, repository: Repository | RepositoryLock) -> Path:
    return paths.models / repository.repo / repository.revision


def download_folder(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.download")


def hold(paths: Paths, pin: ModelPin, say: Say) -> contextlib.AbstractContextManager[None]:
    """Lock the model's repositories, which another model may share."""
    return hold_repositories(paths, {repository.repo for repository in pin.repositories.values()}, say)


@contextlib.contextmanager
def hold_repositories(paths: Paths, repos: Collection[str], say: Say) -> Iterator[None]:
    """In sorted order, so that two runs cannot block each other."""
    with contextlib.ExitStack() as stack:
        for repo in sorted(repos):

            def tell(repo: str = repo) -> None:
                say(f"waiting for another run that uses {repo}")

            stack.enter_context(files.lock(paths.locks / f"repository-{repo.replace('/', '--')}.lock", on_wait=tell))
        yield


def missing_files(folder: Path, repository: RepositoryLock, say: Say) -> list[LockedFile]:
    """What is absent or damaged. A file that the lock does not name is removed: nobody but fetch writes there."""
    named = {file.file for file in repository.files}
    for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
        if not path.is_dir() and path.relative_to(folder).as_posix() not in named:
            say(f"removing {path}: it is not part of {repository.repo} at {repository.revision[:12]}")
            path.unlink()

    def wrong(file: LockedFile) -> str | None:
        path = folder / file.file
        if not path.is_file():
            return ""
        size = path.stat().st_size
        if size != file.size:
            return f"size {size}, wanted {file.size}"
        sha256, _ = files.sha256_file(path)
        return None if sha256 == file.sha256 else f"sha256 {sha256}, wanted {file.sha256}"

    with concurrent.futures.ThreadPoolExecutor(HASH_WORKERS) as pool:
        found = list(pool.map(wrong, repository.files))
    for file, why in zip(repository.files, found, strict=True):
        if why:
            say(f"{folder / file.file} is damaged ({why}): fetching it again")
    return [file for file, why in zip(repository.files, found, strict=True) if why is not None]


def fetch_file(
    folder: Path, repository: RepositoryLock, file: LockedFile, url: str | None, model: str, say: Say
) -> None:
    """Download one file, compare it with the lock, and move it to its place."""

    def is_right(path: Path) -> bool:
        return files.sha256_file(path) == (file.sha256, file.size)

    staged = download(download_folder(folder), repository.repo, repository.revision, file.file, url, say, is_right)
    sha256, size = files.sha256_file(staged)
    if (sha256, size) != (file.sha256, file.size):
        staged.unlink()
        raise IntegrityError.mismatch(
            f"{file.file} of {repository.repo} at {repository.revision}",
            wanted_size=file.size,
            wanted_sha256=file.sha256,
            size=size,
            sha256=sha256,
            next_step=f"invoke fetch; if it stays, the Hub's file is not the locked one: invoke lock --model {model}",
        )
    # Read-only: checkpoints hold hard links to these files, so nothing may write into them.
    staged.chmod(0o444)
    files.sync_file(staged)
    target = folder / file.file
    with files.disk_errors(folder):
        target.parent.mkdir(parents=True, exist_ok=True)
        staged.replace(target)
        files.sync_folder(target.parent)


def lock_repository(paths: Paths, repository: Repository, url: str | None, say: Say) -> dict[str, Any]:
    """One repository's part of the lock, as plain data."""
    from huggingface_hub import HfApi

    say(f"listing {repository.repo} at {repository.revision[:12]}")
    with plain_errors(repository.repo, repository.revision, "its list of files"):
        api = HfApi(endpoint=url, token=token_for(url))
        info = api.model_info(repository.repo, revision=repository.revision, files_metadata=True)
    staging = download_folder(repository_folder(paths, repository))
    rows = []
    for sibling in sorted(info.siblings or [], key=lambda sibling: sibling.rfilename):
        name, blob = sibling.rfilename, sibling.blob_id
        if sibling.lfs is not None:
            sha256, size = sibling.lfs.sha256, sibling.lfs.size
        else:

            def is_right(path: Path, blob: str | None = blob) -> bool:
                return blob is None or files.git_blob_sha1(path.read_bytes()) == blob

            staged = download(staging, repository.repo, repository.revision, name, url, say, is_right)
            if not is_right(staged):
                raise IntegrityError(
                    f"{name} of {repository.repo} at {repository.revision}: wanted git blob {blob} as listed; "
                    f"got {files.git_blob_sha1(staged.read_bytes())}",
                    next_step="the same command again: the Hub, or a proxy before it, gave a wrong file",
                )
            sha256, size = files.sha256_file(staged)
        rows.append({"name": name, "file": name, "size": size, "sha256": sha256})
    return {"repo": repository.repo, "revision": repository.revision, "files": rows}
