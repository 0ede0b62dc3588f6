"""Model repositories: fetched as far as they are needed, used only when every byte is the locked one.

The base of a pin lies complete in `models/<repo>/<revision>/`. Of a donor its index and config lie there, and in the
store its headers and the tensors that are taken, each under its SHA-256.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self
from urllib.parse import quote

from sparkpin.checkpoint.content import Hashes
from sparkpin.checkpoint.repository import Listing, Places, header_of
from sparkpin.core import files
from sparkpin.core.errors import ManifestError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say
from sparkpin.fetch import transfer
from sparkpin.fetch.gguf_wheel import convert_wheel
from sparkpin.fetch.hub import HubRepository
from sparkpin.fetch.model_files import (
    TEXTS,
    blobs_of,
    download_folder,
    fetched_of,
    listing_of,
    own_folder,
    repository_folder,
)
from sparkpin.fetch.packed import commit_of, unpack
from sparkpin.fetch.store import FETCH, Store, find_missing, is_whole, scratch
from sparkpin.fetch.transfer import Folder, Piece, Source
from sparkpin.pins.schema import GgufLock, LockedFile, ModelLock, ModelPin, RepositoryLock


def fetch_model(
    paths: Paths, pin: ModelPin, lock: ModelLock, *, only: Collection[str] | None = None, deep: bool = False
) -> Places:
    """Where the bytes of the model's repositories lie (all, or those named in `only`), verified.

    What is there and right costs no network, and of the base a hash the first time (deep: each time); a damaged file is
    reported and fetched again. Raises NetworkError, DiskError, ManifestError for a lock that lacks what the pin asks
    for, IntegrityError for other bytes than locked.
    """
    wanted, hashes = wanted_of(pin, lock, only), Hashes.here(paths, deep=deep)
    with Fetching.begin(paths, pin, lock.gguf) as fetching:
        fetching.fetch(fetching.outlines({name: row for name, row in wanted.items() if not pin.is_whole(name)}))
        complete, parts = list[Piece](), list[Piece]()
        folders, tensors = dict[str, Path](), dict[str, dict[str, Path]]()
        for name, entry in wanted.items():
            if pin.is_whole(name):
                folder = folders[name] = repository_folder(paths, entry)
                absent = find_missing(((file, folder / file.file) for file in entry.files), hashes.sha256)
                complete += [fetching.piece(name, entry, row.file, row.sha256) for row in absent]
            else:
                tensors[name] = {row.name: Store(paths.store).path(row.sha256) for row in entry.tensors}
                parts += fetching.tensors(name, entry)
        fetching.fetch(complete + parts)
        for piece in complete:
            if piece.target.stat().st_nlink == 1:  # else somebody may write into it
                hashes.note(piece.target, piece.sha256)
        hashes.save()
    return Places(folders, tensors)


def listings(
    paths: Paths, pin: ModelPin, lock: ModelLock, *, only: Collection[str] | None = None
) -> dict[str, Listing]:
    """What a plan is made from, verified; headers and texts that are not here are fetched, and nothing else.
    A model from a GGUF file is fetched and converted: it has no headers before.

    Raises what `fetch_model` raises.
    """
    if pin.gguf:
        fetch_model(paths, pin, lock, only=only)  # all that one conversion gives, and not its config alone
    wanted = wanted_of(pin, lock, only)
    with Fetching.begin(paths, pin, lock.gguf) as fetching:
        fetching.fetch(fetching.outlines(wanted, remove=False))
    return {name: listing_of(paths, pin, name, entry) for name, entry in wanted.items()}


def has_listings(paths: Paths, pin: ModelPin, lock: ModelLock) -> bool:
    """Whether `listings` fetches nothing. Never of a GGUF file: these are had by fetching the model."""
    entries = wanted_of(pin, lock, None).values()
    rows = [row for entry in entries for row in outline_files(paths, entry)]
    return not pin.gguf and not find_missing(rows, remove=False)


def outline_files(paths: Paths, entry: RepositoryLock) -> list[tuple[LockedFile, Path]]:
    """The headers, indexes and configs of a repository, and where they lie."""
    folder, store = repository_folder(paths, entry), Store(paths.store)
    texts = [(row, folder / row.file) for row in entry.files if row.file in TEXTS]
    return [*texts, *((row, store.path(row.sha256)) for row in entry.headers)]


def wanted_of(pin: ModelPin, lock: ModelLock, only: Collection[str] | None) -> dict[str, RepositoryLock]:
    names = [name for name in pin.repositories if only is None or name in only]
    if absent := sorted(set(names) - lock.repositories.keys()):
        file, step = f"pins/models/{pin.name}.lock", f"invoke lock --model {pin.name}"
        raise ManifestError(file, "repositories", sorted(lock.repositories), f"also {absent}", next_step=step)
    return {name: lock.repositories[name] for name in names}


def absent_bytes(paths: Paths, pin: ModelPin, lock: ModelLock, only: Collection[str]) -> int:
    """What `fetch_model` would ask a Hub for, by names and sizes; nothing where the model is generated, or a folder."""
    store, found = Store(paths.store), 0
    for name in only:
        if pin.owner(name).is_made or pin.repositories[name].folder:
            continue
        entry = lock.repositories[name]
        folder, hub = repository_folder(paths, entry), HubRepository(entry.repo, entry.revision)
        parts, sizes = fetched_of(entry, is_whole=pin.is_whole(name)), {file.file: file.size for file in entry.files}
        absent = [row for row in parts.files if not is_whole(folder / row.file, row.size)]
        absent += [row for row in blobs_of(parts) if not store.has(row)]
        found += sum(row.size for row in absent if not hub.local(row.file, sizes[row.file]))
        found -= sum(path.stat().st_size for path in folder.rglob("*.part"))
    return max(0, found)


@dataclass
class Fetching:
    """What the pieces of a pin's repositories have in common. gguf: of its lock; folders: pin's name -> folder of the
    repositories that were made here, until `end`.
    """

    paths: Paths
    pin: ModelPin
    gguf: GgufLock | None
    end: contextlib.ExitStack
    folders: dict[str, Path] = field(default_factory=dict)

    @classmethod
    @contextlib.contextmanager
    def begin(cls, paths: Paths, pin: ModelPin, gguf: GgufLock | None) -> Iterator[Self]:
        """Locks the model's repositories, which another model may share."""
        with hold_repositories(paths, {row.repo for row in pin.repositories.values()}) as end:
            yield cls(paths, pin, gguf, end)

    @property
    def advice(self) -> str:
        """What to do about wrong bytes."""
        return f"{FETCH}; if that also fails, the Hub has another file: invoke lock --model {self.pin.name}"

    def source(self, name: str, revision: str) -> Source:
        """Where a repository's bytes are: a folder, or the Hub. A model that is made here is made now."""
        repo, owner = self.pin.repositories[name].repo, self.pin.owner(name)
        if local := own_folder(self.paths, self.pin, name):
            return local
        if not owner.is_made:
            return HubRepository(repo, revision, self.advice)
        if owner.name not in self.folders:
            self.folders[owner.name] = self.end.enter_context(generated(self.paths, owner, self.gguf))
        return Folder(self.folders[owner.name] / repo, self.advice)

    def piece(
        self, name: str, entry: RepositoryLock, file: str, sha256: str = "", span: tuple[int, int] | None = None
    ) -> Piece:
        """All of a file, for the folder, or a span of it, for the store. sha256: "" for what no lock has yet, which
        waits for its hash in a folder of its own."""
        [size] = [row.size for row in entry.files if row.file == file]
        folder, (begin, end) = repository_folder(self.paths, entry), span or (0, size)
        is_local = span and is_whole(folder / file, size)
        source = Folder(folder, self.advice) if is_local else self.source(name, entry.revision)
        target = Store(self.paths.store).path(sha256) if span else folder / file
        if not sha256:
            target = download_folder(self.paths, entry) / f"{quote(file, safe='')}.{begin}-{end}"
        owner = entry.repo.replace("/", "--") if span and sha256 else ""
        return Piece([source], file, size, begin, end, target, sha256, owner=owner)

    def outlines(self, entries: Mapping[str, RepositoryLock], *, remove: bool = True) -> list[Piece]:
        """Pieces for the headers, indexes and configs that are not here. remove: damaged ones go."""
        pieces = []
        for name, entry in entries.items():
            for row in find_missing(outline_files(self.paths, entry), remove=remove):
                span = None if row.file in TEXTS else (0, row.size)
                pieces.append(self.piece(name, entry, row.file, row.sha256, span))
        return pieces

    def tensors(self, name: str, entry: RepositoryLock) -> list[Piece]:
        """Pieces for tensors that are not here. ManifestError for one that the header has not, or of another size."""
        listing, store, pieces = listing_of(self.paths, self.pin, name, entry), Store(self.paths.store), []
        header = functools.cache(functools.partial(header_of, listing))
        for row in find_missing((row, store.path(row.sha256)) for row in entry.tensors):
            info = header(row.file).tensors.get(row.name)
            if info is None or info.nbytes != row.size:
                expected = f"{info.nbytes} bytes, as in {row.file}" if info else f"a tensor of {row.file}"
                raise ManifestError(f"the lock of {listing.origin}", row.name, f"{row.size} bytes", expected)
            pieces.append(self.piece(name, entry, row.file, row.sha256, (info.begin, info.end)))
        return pieces

    def fetch(self, pieces: Sequence[Piece]) -> None:
        pieces = list({piece.target: piece for piece in pieces}.values())  # some tensors have the same bytes
        needed = sum(piece.length - piece.present for piece in pieces)
        files.require_space(self.paths.models, needed, "the model's files", "SPARKPIN_CACHE")
        transfer.fetch(pieces, title=f"fetching {self.pin.name}")


@contextlib.contextmanager
def hold_repositories(paths: Paths, repos: Collection[str]) -> Iterator[contextlib.ExitStack]:
    """In sorted order, so that no two runs block each other."""
    with files.disk_errors(paths.models), contextlib.ExitStack() as end:
        for repo in sorted(repos):
            path = paths.locks / f"repository-{repo.replace('/', '--')}.lock"
            end.enter_context(files.lock(path, on_wait=f"waiting for another run that uses {repo}"))
        yield end


@contextlib.contextmanager
def generated(paths: Paths, pin: ModelPin, gguf: GgufLock | None) -> Iterator[Path]:
    """A new folder with the repositories of a model that is made here. gguf: of its lock.

    What makes it is part of what the pin freezes: ManifestError when it makes other commits than the pinned ones.
    """
    with scratch(paths.work / f"model-{pin.name}") as folder:
        if pin.packed:
            say(f"unpacking {pin.packed.path}")
            unpack(paths.project, pin.packed, folder)
        else:
            assert gguf  # a lock without it is of other inputs than its pin
            convert_wheel(paths, pin, gguf, folder)
        found = {key: commit_of(folder / row.repo) for key, row in pin.repositories.items()}
        pinned = {key: row.revision for key, row in pin.repositories.items()}
        if found != pinned:
            commits = ", ".join(f"repositories.{key}.revision to {sha}" for key, sha in found.items())
            step = f"if it was changed on purpose, set {commits} (and model_revision in its recipes), then lock again"
            file, expected = paths.project / f"pins/models/{pin.name}.yaml", f"{found}, which is made here"
            raise ManifestError(file, "repositories", pinned, expected, next_step=step)
        yield folder
