"""Model repositories: fetched as far as they are needed, used only when every byte is the locked one.

The base of a pin lies complete in `models/<repo>/<revision>/`. Of a donor its index and config lie there, and in the
store its headers and the tensors that are taken, each under its SHA-256. What is being fetched lies in
`<revision>.download/`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from urllib.parse import quote

from sparkpin.checkpoint.content import Hashes
from sparkpin.checkpoint.repository import Listing, Places, header_of
from sparkpin.checkpoint.write import link_or_copy
from sparkpin.core import files, terminal
from sparkpin.core.errors import IntegrityError, ManifestError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import Say
from sparkpin.fetch import transfer
from sparkpin.fetch.gguf_wheel import convert_wheel
from sparkpin.fetch.hub import Source, is_whole
from sparkpin.fetch.model_files import (
    TEXTS,
    blobs_of,
    download_folder,
    fetched_of,
    listing_of,
    mend_folder,
    places_of,
    repository_folder,
    require_sources,
    source_folder,
)
from sparkpin.fetch.store import HASH_WORKERS, Store, check, find_missing
from sparkpin.fetch.transfer import Piece
from sparkpin.pins.schema import GgufLock, LockedFile, ModelLock, ModelPin, RepositoryLock

COMMIT = re.compile(r"[0-9a-f]{40}")


def fetch_model(
    paths: Paths, pin: ModelPin, lock: ModelLock, say: Say, *, only: Collection[str] | None = None, deep: bool = False
) -> Places:
    """Where the bytes of the model's repositories lie (all, or those named in `only`), verified.

    What is there and right costs no network, and of the base a hash the first time (deep: each time); a damaged file is
    reported and fetched again. Raises NetworkError, DiskError, ManifestError for a lock that lacks what the pin asks
    for, IntegrityError for other bytes than locked.
    """
    wanted = wanted_of(paths, pin, lock, only)
    donors = {name: entry for name, entry in wanted.items() if not pin.is_whole(name)}
    with hold(paths, pin, say), sites(paths, pin, lock.gguf, say) as site_of:
        fetch_pieces(paths, pin, outlines(site_of, donors, say), say)
        hashes, parts, complete = Hashes.here(paths, deep=deep), list[Piece](), list[Piece]()
        for name, entry in wanted.items():
            site = site_of(name, entry.revision)
            if name in donors:
                parts += tensor_pieces(site, listing_of(paths, pin, name, entry), entry.tensors, say)
            else:
                remove_strays(site.folder, entry, say)
                places = ((file, site.folder / file.file) for file in entry.files)
                absent = site.link(find_missing(places, say, hashes.sha256))
                complete += [site.piece(row.file, row.size, sha256=row.sha256) for row in absent]
        fetch_pieces(paths, pin, complete + parts, say)
        for piece in complete:
            hashes.note(piece.target, piece.sha256)
        hashes.save()
        for entry in wanted.values():
            shutil.rmtree(download_folder(paths, entry), ignore_errors=True)
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
    with hold(paths, pin, say), sites(paths, pin, lock.gguf, say) as site_of:
        fetch_pieces(paths, pin, outlines(site_of, wanted, say, remove=False), say)
    return {name: listing_of(paths, pin, name, entry) for name, entry in wanted.items()}


def wanted_of(paths: Paths, pin: ModelPin, lock: ModelLock, only: Collection[str] | None) -> dict[str, RepositoryLock]:
    wanted = {}
    for name in [name for name in pin.repositories if only is None or name in only]:
        entry, repo = lock.repositories.get(name), pin.repositories[name].repo
        if entry is None or entry.repo != repo or not COMMIT.fullmatch(entry.revision):  # they name a folder
            got = f"{entry.repo} at {entry.revision}" if entry else "(missing)"
            expected, step = f"{repo} at a commit of 40 hexadecimal digits", f"invoke lock --model {pin.name}"
            raise ManifestError(f"pins/models/{pin.name}.lock", f"repositories.{name}", got, expected, next_step=step)
        require_sources(paths, pin, name, entry)
        wanted[name] = entry
    return wanted


def absent_bytes(paths: Paths, pin: ModelPin, lock: ModelLock, only: Collection[str]) -> int:
    """What `fetch_model` would ask a Hub for, by names and sizes; nothing where the model is generated, or a folder."""
    store, found = Store(paths.store), 0
    for name in only:
        if pin.owner(name).is_made or pin.repositories[name].folder:
            continue
        entry = lock.repositories[name]
        folder, hub = repository_folder(paths, entry), Source(entry.repo, entry.revision)
        parts, sizes = fetched_of(entry, whole=pin.is_whole(name)), {file.file: file.size for file in entry.files}
        absent = [row for row in parts.files if not is_whole(folder / row.file, row.size)]
        absent += [row for row in blobs_of(parts) if not store.has(row)]
        found += sum(row.size for row in absent if not hub.local(row.file, sizes[row.file]))
        found -= sum(path.stat().st_size for path in download_folder(paths, entry).glob("*.part"))
    return max(0, found)


def absent_wheel(paths: Paths, pin: ModelPin, lock: ModelLock) -> LockedFile | None:
    """What `fetch_model` would ask the package index for, by names and sizes: the wheel that a model is made from."""
    if lock.gguf is None or Store(paths.store).has(lock.gguf.wheel):
        return None
    entry = lock.repositories[pin.base]
    folder = repository_folder(paths, entry)
    return None if all(is_whole(folder / file.file, file.size) for file in entry.files) else lock.gguf.wheel


@dataclass(eq=False)
class Site:
    """One repository. find: gives the source, once a byte of it is needed; folder: of complete files; parts: where
    pieces grow, and stay until a lock has their hash."""

    find: Callable[[], Source]
    folder: Path
    parts: Path
    store: Store

    @cached_property
    def source(self) -> Source:
        return self.find()

    def piece(self, file: str, size: int, begin: int = 0, end: int = -1, sha256: str = "", git: str = "") -> Piece:
        """All of a file of `size` bytes, for the folder, or the bytes `begin` to `end`, for the store."""
        end = size if end < 0 else end
        grown = self.parts / f"{quote(file, safe='')}.{begin}-{end}"
        part, target = grown.with_name(f"{grown.name}.part"), self.store.path(sha256) if sha256 else grown
        if (begin, end) == (0, size):
            return Piece(self.source, file, size, begin, end, part, self.folder / file, sha256, git)
        source = self.source if not is_whole(self.folder / file, size) else replace(self.source, folder=self.folder)
        return Piece(source, file, size, begin, end, part, target, sha256)

    def link(self, rows: Sequence[LockedFile]) -> list[LockedFile]:
        """Hard-link what a person's folder or the Hub cache has to its place, which saves its bytes; gives the rest.

        It stays the file of that folder, so it is not made read-only. IntegrityError for a folder's wrong file.
        """
        with ThreadPoolExecutor(HASH_WORKERS) as pool:
            linked = list(pool.map(functools.partial(self.is_linked, self.source), rows)) if rows else []
        return [row for row, done in zip(rows, linked, strict=True) if not done]

    def is_linked(self, source: Source, row: LockedFile) -> bool:
        path = source.local(row.file, row.size)
        if path is None or not row.file.endswith(".safetensors") or (source.folder and not source.next_step):
            return False
        link, target = self.parts / f"{quote(row.file, safe='')}.link", self.folder / row.file
        with files.disk_errors(self.parts):
            self.parts.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)
            link_or_copy(path.resolve(), link)
            try:
                check(row, *files.sha256_file(link), str(path), source.next_step)
            except IntegrityError:
                link.unlink()
                if source.folder:
                    raise
                return False  # a damaged cache is no reason to fail: the Hub has the file
            target.parent.mkdir(parents=True, exist_ok=True)
            link.replace(target)
            files.sync_folder(target.parent)
        return True


@contextlib.contextmanager
def sites(paths: Paths, pin: ModelPin, gguf: GgufLock | None, say: Say) -> Iterator[Callable[[str, str], Site]]:
    """Gives the site of a repository of the pin at a revision. A model is generated when a byte of it is needed."""
    with contextlib.ExitStack() as stack:
        owners = {pin.owner(name).name: pin.owner(name) for name in pin.repositories}
        made = functools.cache(lambda owner: stack.enter_context(generated(paths, owners[owner], gguf, say)))

        @functools.cache
        def site_of(name: str, revision: str) -> Site:
            repository = pin.repositories[name].model_copy(update={"revision": revision})
            owner, own = pin.owner(name), source_folder(paths, pin, name)

            def find() -> Source:
                folder = own or (made(owner.name) / repository.repo if owner.is_made else None)
                return Source(repository.repo, revision, folder, mend_folder(own, pin) if own else "")

            folder, parts = repository_folder(paths, repository), download_folder(paths, repository)
            return Site(find, folder, parts, Store(paths.store))

        yield site_of


@contextlib.contextmanager
def generated(paths: Paths, pin: ModelPin, gguf: GgufLock | None, say: Say) -> Iterator[Path]:
    """A new folder with the repositories of a model that is made here. gguf: of its lock.

    What makes it is part of what the pin freezes: ManifestError when it makes other commits than the pinned ones.
    """
    from sparkpin.fetch.packed import commit_of, unpack

    pin_file, again = paths.project / f"pins/models/{pin.name}.yaml", f"invoke lock --model {pin.name}"
    work = paths.work / f"model-{pin.name}"
    with files.disk_errors(work):
        work.mkdir(parents=True, exist_ok=True)
        files.sweep(work)
    with files.disk_errors(work), tempfile.TemporaryDirectory(prefix=files.PARTIAL, dir=work) as name:
        folder = Path(name)
        if pin.packed:
            say(f"unpacking {pin.packed.path}")
            unpack(paths.project, pin.name, pin.packed, pin.repositories, folder)
        else:
            assert gguf  # a lock without it is of other inputs than its pin
            convert_wheel(paths, pin, gguf, folder, say)
        made = {key: commit_of(folder / repository.repo) for key, repository in pin.repositories.items()}
        if changed := {key: sha for key, sha in made.items() if sha != pin.repositories[key].revision}:
            commits = ", ".join(f"repositories.{key}.revision to {sha}" for key, sha in changed.items())
            step = f"if it was changed on purpose, set {commits} (and model_revision in its recipes), then: {again}"
            key, sha = next(iter(changed.items()))
            where, got = f"repositories.{key}.revision", pin.repositories[key].revision
            raise ManifestError(pin_file, where, got, f"{sha}, which is made here", next_step=step)
        yield folder


def outlines(
    site_of: Callable[[str, str], Site], entries: Mapping[str, RepositoryLock], say: Say, *, remove: bool = True
) -> list[Piece]:
    """Pieces for the headers, indexes and configs that are not here. remove: damaged ones go."""
    pieces: list[Piece] = []
    for name, entry in entries.items():
        site, sizes = site_of(name, entry.revision), {file.file: file.size for file in entry.files}
        rows = [(row, site.folder / row.file) for row in entry.files if row.file in TEXTS]
        rows += in_store(site.store, entry.headers)
        absent = find_missing(rows, say, remove=remove)
        pieces += [site.piece(row.file, sizes[row.file], 0, row.size, row.sha256) for row in absent]
    return pieces


def in_store(store: Store, rows: Iterable[LockedFile]) -> list[tuple[LockedFile, Path]]:
    """Where headers and tensors lie, each content once."""
    return [(row, store.path(sha256)) for sha256, row in {row.sha256: row for row in rows}.items()]


def tensor_pieces(site: Site, listing: Listing, rows: Iterable[LockedFile], say: Say) -> list[Piece]:
    """Pieces for tensors that are not here. ManifestError for one that the header has not, or with another size."""
    pieces = []
    absent = sorted(find_missing(in_store(site.store, rows), say), key=lambda row: row.file)
    for file, group in itertools.groupby(absent, key=lambda row: row.file):
        infos = header_of(listing, file).tensors
        for row in group:
            info = infos.get(row.name)
            if info is None or info.nbytes != row.size:
                expected = f"{info.nbytes} bytes, as in {file}" if info else f"a tensor of {file}"
                raise ManifestError(f"the lock of {listing.origin}", row.name, f"{row.size} bytes", expected)
            pieces.append(site.piece(file, listing.files[file], info.begin, info.end, row.sha256))
    return pieces


def fetch_pieces(paths: Paths, pin: ModelPin, pieces: Sequence[Piece], say: Say, advice: str = "") -> None:
    """advice: what to do about bytes that are wrong, twice."""
    needed = sum(piece.length for piece in pieces)
    needed -= sum(piece.part.stat().st_size for piece in pieces if piece.part.is_file())
    files.require_space(paths.models, needed, "the model's files", "SPARKPIN_CACHE")
    if any(piece.source.folder is None for piece in pieces):
        say(f"fetching {pin.name}: {terminal.size(needed)}")
    usual = f"invoke build --fetch-only; if that fails, too, the Hub has another file: invoke lock --model {pin.name}"
    transfer.fetch(pieces, say, title=f"fetching {pin.name}", advice=advice or usual)


def hold(paths: Paths, pin: ModelPin, say: Say) -> contextlib.AbstractContextManager[None]:
    """Lock the model's repositories, which another model may share."""
    return hold_repositories(paths, {repository.repo for repository in pin.repositories.values()}, say)


@contextlib.contextmanager
def hold_repositories(paths: Paths, repos: Collection[str], say: Say) -> Iterator[None]:
    """In sorted order, so that two runs cannot block each other."""
    with files.disk_errors(paths.models), contextlib.ExitStack() as stack:
        for repo in sorted(repos):
            wait = functools.partial(say, f"waiting for another run that uses {repo}")
            stack.enter_context(files.lock(paths.locks / f"repository-{repo.replace('/', '--')}.lock", on_wait=wait))
        yield
        for repo in repos:
            for folder in (paths.models / repo).glob("*.download"):
                with contextlib.suppress(OSError):  # where a piece was begun
                    folder.rmdir()


def remove_strays(folder: Path, repository: RepositoryLock, say: Say) -> None:
    """What the lock does not name is removed: nobody but fetch writes there, and loaders read what they find."""
    named = {file.file for file in repository.files}
    for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
        is_right = path.is_file() if path.relative_to(folder).as_posix() in named else path.is_dir()
        if not is_right and os.path.lexists(path):
            say(f"removing {path}: it is no file of {repository.repo} at {repository.revision[:12]}")
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
