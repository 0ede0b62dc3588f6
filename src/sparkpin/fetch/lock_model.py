"""Lock a model: which commit, which files, which headers, and which tensors the pin's steps take, all by hash."""

from __future__ import annotations

import functools
import hashlib
import itertools
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparkpin.checkpoint.plan import locked_steps, make_plan, taken
from sparkpin.checkpoint.repository import TensorPlace, is_shard
from sparkpin.core import files
from sparkpin.core.errors import ManifestError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import Say
from sparkpin.fetch import model
from sparkpin.fetch.gguf_wheel import lock_gguf
from sparkpin.fetch.hub_client import asked
from sparkpin.fetch.hub_repository import Site, generated, site_of
from sparkpin.fetch.model_files import TEXTS, download_folder, is_there, listing_of, mend_folder
from sparkpin.fetch.origins import SILENCE
from sparkpin.fetch.pieces import FilePiece
from sparkpin.fetch.store import HASH_WORKERS, Store, check
from sparkpin.fetch.transfer import CONNECTIONS
from sparkpin.pins import manifests, reading
from sparkpin.pins.schema import UNRESOLVED, LockedFile, ModelLock, ModelPin, PinnedRepository, RepositoryLock

AGAIN = "the same command again; if it stays, the Hub, or a proxy before it, gives wrong bytes"
LOUD = 100_000_000
"""Bytes of a file from which on its hashing is told."""


def lock_model(paths: Paths, name: str, say: Say, *, newest: bool = False) -> ModelLock:
    """Write `pins/models/<name>.lock`. Headers are fetched, the tensors that are taken, and of whole files small ones.

    What the former lock says of the same commits must still be so. newest: whatever commit it has. Raises ManifestError
    (also if a generated model's commit is not the pinned one), NetworkError, DiskError, IntegrityError, and
    CheckpointError if the repositories do not fit each other.
    """
    pin = manifests.load_model(paths.project, name)
    former = former_lock(paths.project, name, say)
    gguf = lock_gguf(paths, pin, pin.gguf, former.gguf if former else None, say) if pin.gguf else None
    with model.hold(paths, pin, say), generated(paths, pin, gguf, say) as made:
        locking = Locking(paths, pin, former, made, say, newest)
        entries = {key: locking.with_headers(key, locking.listed(key)) for key in pin.repositories}
        say(f"planning what {name} takes")
        listings = {key: listing_of(paths, pin, key, entry) for key, entry in entries.items()}
        entries |= locking.with_tensors(entries, taken(make_plan(listings, pin, locked_steps(pin))))
        lock = ModelLock(model=name, inputs=manifests.model_inputs(pin), gguf=gguf, repositories=entries)
        with files.atomic_file(paths.project / f"pins/models/{name}.lock") as file:
            file.write(manifests.lock_text(lock).encode())
        for entry in entries.values():
            shutil.rmtree(download_folder(paths, entry), ignore_errors=True)
    model.tell_share(name, locking.received, locking.total, say)
    return lock


def former_lock(project: Path, name: str, say: Say) -> ModelLock | None:
    """None where there is none, and for one that cannot be read, which is told: nothing is held to it then."""
    if not (project / f"pins/models/{name}.lock").is_file():
        return None
    try:
        return manifests.former_model_lock(project, name)
    except ManifestError as error:
        say(f"{error.message}: what it said is not compared, and all hashes are believed anew")
        return None


@dataclass(frozen=True, slots=True)
class Listed:
    """A file as the Hub lists it. sha256: of large ones; git: git's blob hash of the others."""

    file: str
    size: int
    sha256: str
    git: str


@dataclass
class Locking:
    """made: a generated model's folder; received: bytes that came; total: bytes of all files of the repositories."""

    paths: Paths
    pin: ModelPin
    former: ModelLock | None
    made: Path | None
    say: Say
    newest: bool = False
    sites: dict[str, Site] = field(default_factory=dict)
    received: int = 0
    total: int = 0

    def listed(self, key: str) -> RepositoryLock:
        """The files of a repository; of a donor only those that the Hub has a SHA-256 of, its index and config."""
        repository = self.pin.repositories[key]
        if repository.folder:
            rows = list(hashed(self.paths.project / repository.folder, self.manifest, key, self.pin, self.say))
            revision = commit_of(rows)
            self.tell_changes(key, revision, rows)
        else:
            revision = self.resolve(key, repository)
            self.say(f"listing {repository.repo} at {revision[:12]}")
            rows = list(self.listing(repository, revision))
        self.total += sum(row.size for row in rows)
        unknown = "0" * 64
        self.parsed(repository, revision, {row.file: (row.size, unknown) for row in rows})  # before a name is a path
        site = self.sites[key] = site_of(self.paths, self.pin, key, revision, lambda: self.made)
        known = {row.file: row.sha256 for row in rows if row.sha256}
        wanted = [row for row in rows if row.file in TEXTS or (key == self.pin.base and not row.sha256)]
        absent = []
        for row in wanted:
            if (sha256 := sha256_if_here(site.folder / row.file, row)) is None:
                absent.append(row)
            else:
                known[row.file] = sha256
        pieces = [site.whole(row.file, row.size, row.sha256, row.git) for row in absent]
        known |= zip((row.file for row in absent), self.fetch(pieces), strict=True)
        sums = {row.file: (row.size, known[row.file]) for row in rows if row.file in known}
        entry = self.parsed(repository, revision, sums)
        for former in self.known(key, entry, "files"):
            self.hold(entry, former, *sums.get(former.file, (former.size, former.sha256)))
        return entry

    def tell_changes(self, key: str, revision: str, rows: Sequence[Listed]) -> None:
        """A folder may change, and by mistake, too: then the lock takes it as it is, but not in silence."""
        former = self.former.repositories.get(key) if self.former else None
        if former is None or former.repo != self.pin.repositories[key].repo or former.revision == revision:
            return
        new, old = {row.file: row.sha256 for row in rows}, {row.file: row.sha256 for row in former.files}
        for file in sorted(new.keys() | old.keys()):
            if new.get(file) != old.get(file):
                word = "new" if file not in old else "gone" if file not in new else "changed"
                self.say(f"{self.pin.repositories[key].folder}: {file} is {word} since the former lock")
        self.say(
            f"{key}: revision {former.revision[:12]} becomes {revision[:12]}, so checkpoints are built anew; if that "
            f"is not meant, put the files back, then: invoke lock --model {self.pin.name}"
        )

    def hold(self, entry: RepositoryLock, row: LockedFile, size: int, sha256: str) -> None:
        """A commit's files never change: IntegrityError when the Hub has come to say otherwise."""
        lock = self.manifest.with_suffix(".lock")
        step = f"{AGAIN}. If {lock} is what is wrong: rm {lock}, and lock again"
        check(row, sha256, size, f"{row.file} of {entry.repo} at {entry.revision[:12]}", step)

    def parsed(
        self, repository: PinnedRepository, revision: str, rows: Mapping[str, tuple[int, str]]
    ) -> RepositoryLock:
        found = [
            {"name": file, "file": file, "size": n, "sha256": sha256} for file, (n, sha256) in sorted(rows.items())
        ]
        value = {"repo": repository.repo, "revision": revision, "files": found}
        step = "report this: the repository has a file name that is not allowed"
        return reading.parse(RepositoryLock, value, self.manifest, next_step=step)

    def resolve(self, key: str, repository: PinnedRepository) -> str:
        """The pinned commit; where there is none, that of the former lock, or the newest."""
        if repository.revision != UNRESOLVED:
            return repository.revision
        former = self.former.repositories.get(key) if self.former else None
        if former and former.repo == repository.repo and not self.newest:
            self.say(
                f"{repository.repo}: stays at {former.revision}, as pins/models/{self.pin.name}.lock says "
                "(for the newest commit remove that file first)"
            )
            return former.revision
        revision = str(self.info(repository.repo, "main").sha)
        self.say(f"{repository.repo}: its newest commit is {revision}, which the lock keeps")
        return revision

    def info(self, repo: str, revision: str) -> Any:
        from huggingface_hub import HfApi

        ask = functools.partial(HfApi().model_info, repo, revision=revision, files_metadata=True, timeout=SILENCE)
        return asked(ask, repo, revision, "the list of files", self.say)

    def listing(self, repository: PinnedRepository, revision: str) -> Iterator[Listed]:
        if self.made:
            from sparkpin.fetch.packed import files_of

            yield from itertools.starmap(Listed, files_of(self.made / repository.repo))
            return
        for sibling in self.info(repository.repo, revision).siblings or []:
            if sibling.lfs is not None:
                yield Listed(sibling.rfilename, sibling.lfs.size, sibling.lfs.sha256, "")
            else:
                yield Listed(sibling.rfilename, sibling.size or 0, "", sibling.blob_id or "")

    def with_headers(self, key: str, entry: RepositoryLock) -> RepositoryLock:
        site, store = self.sites[key], Store(self.paths.store)
        shards = [file for file in entry.files if is_shard(file.file)]
        rows = {row.file: row for row in self.known(key, entry, "headers")}
        new = [file for file in shards if file.file not in rows]
        if new:
            self.say(f"reading {len(new)} headers of {entry.repo}")
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            ends = list(pool.map(lambda file: site.header_end(file.file, file.size, self.say), new))
        sizes = {file.file: file.size for file in shards}
        again = model.lacking(store, rows.values(), self.say)
        pieces = [site.header(row.file, sizes[row.file], row.size, row.sha256) for row in again]
        pieces += [site.header(file.file, file.size, end) for file, end in zip(new, ends, strict=True)]
        fetched = self.fetch(pieces)[len(again) :]
        for file, end, sha256 in zip(new, ends, fetched, strict=True):
            rows[file.file] = locked(file.file, file.file, end, sha256)
        return entry.model_copy(update={"headers": [rows[file.file] for file in shards]})

    def with_tensors(
        self, entries: Mapping[str, RepositoryLock], wanted: Mapping[str, Sequence[TensorPlace]]
    ) -> dict[str, RepositoryLock]:
        """The donors' part of the lock, with all that a plan takes from them."""
        store = Store(self.paths.store)
        rows: dict[tuple[str, str], LockedFile] = {}
        pieces: list[FilePiece] = []
        new: list[tuple[str, TensorPlace]] = []
        for key, sources in wanted.items():
            site, listing = self.sites[key], listing_of(self.paths, self.pin, key, entries[key])
            known = {row.name: row for row in [*noted(site, sources), *self.known(key, entries[key], "tensors")]}
            old = [known[source.info.name] for source in sources if source.info.name in known]
            rows |= {(key, row.name): row for row in old}
            pieces += model.tensor_pieces(site, listing, model.lacking(store, old, self.say))
            new += [(key, source) for source in sources if source.info.name not in known]
        count = len(pieces)
        for key, (_, file, info) in new:
            size = next(row.size for row in entries[key].files if row.file == file)
            pieces.append(self.sites[key].tensor(info.name, file, size, info.begin, info.end))
        for (key, (_, file, info)), sha256 in zip(new, self.fetch(pieces)[count:], strict=True):
            rows[key, info.name] = locked(info.name, file, info.nbytes, sha256)
        return {
            key: entries[key].model_copy(update={"tensors": [rows[key, source.info.name] for source in sources]})
            for key, sources in wanted.items()
        }

    def known(self, key: str, entry: RepositoryLock, part: str) -> list[LockedFile]:
        """What the former lock says of this commit: it stays so, whatever the Hub gives now."""
        former = self.former.repositories.get(key) if self.former else None
        if former and (former.repo, former.revision) == (entry.repo, entry.revision):
            return list(getattr(former, part))
        return []

    def fetch(self, pieces: Sequence[FilePiece]) -> tuple[str, ...]:
        """SHA-256 of each."""
        fetched = model.fetch_pieces(self.paths, self.pin, pieces, self.say, AGAIN)
        self.received += fetched.received
        return fetched.sha256

    @property
    def manifest(self) -> Path:
        return self.paths.project / f"pins/models/{self.pin.name}.yaml"


def noted(site: Site, sources: Sequence[TensorPlace]) -> Iterator[LockedFile]:
    """Tensors that a killed run had fetched already."""
    for _, file, info in sources:
        if sha256 := site.noted(file, info.begin, info.end):
            yield locked(info.name, file, info.nbytes, sha256)


def locked(name: str, file: str, size: int, sha256: str) -> LockedFile:
    return LockedFile(name=name, file=file, size=size, sha256=sha256)


def sha256_if_here(path: Path, row: Listed) -> str | None:
    """SHA-256 of a file that an earlier run fetched, if it is the listed one."""
    if not path.is_file() or path.stat().st_size != row.size:
        return None
    sha256, _ = files.sha256_file(path)
    right = sha256 == row.sha256 if row.sha256 else row.git and files.git_blob_sha1(path.read_bytes()) == row.git
    return sha256 if right else None


def hashed(folder: Path, manifest: Path, key: str, pin: ModelPin, say: Say) -> Iterator[Listed]:
    """Every file of a folder that stands for a repository, but hidden ones (.git, .cache)."""
    if not folder.is_dir():
        raise ManifestError(manifest, f"repositories.{key}.folder", str(folder), "a folder with the repository's files")
    names = sorted(path.relative_to(folder) for path in folder.rglob("*"))
    names = [name for name in names if not any(part.startswith(".") for part in name.parts)]
    names = [name for name in names if is_shard(name.as_posix()) or not (folder / name).is_dir()]
    for name in names:
        is_there(folder / name, mend_folder(folder, pin))

    def row(name: Path) -> Listed:
        size = (folder / name).stat().st_size
        if size >= LOUD:
            say(f"hashing {folder / name} ({size / 1e6:,.1f} MB)")
        return Listed(name.as_posix(), size, files.sha256_file(folder / name)[0], "")

    with ThreadPoolExecutor(HASH_WORKERS) as pool:
        yield from pool.map(row, names)


def commit_of(rows: Sequence[Listed]) -> str:
    """40 hex digits that stand for these files, as a commit does."""
    text = "".join(f"{row.sha256} {row.file}\n" for row in rows)
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
