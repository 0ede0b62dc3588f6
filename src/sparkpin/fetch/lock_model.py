"""Lock a model: which commit, which files, which headers, and which tensors the pin's steps take, all by hash."""

from __future__ import annotations

import hashlib
import itertools
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from sparkpin.checkpoint.plan import donor_tensors, make_plan
from sparkpin.checkpoint.repository import OTHER, is_shard
from sparkpin.checkpoint.safetensors import PREFIX_BYTES, header_length
from sparkpin.checkpoint.steps import locked_steps
from sparkpin.core import files, terminal
from sparkpin.core.errors import IntegrityError, ManifestError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import Say
from sparkpin.fetch import model
from sparkpin.fetch.gguf_wheel import lock_gguf
from sparkpin.fetch.hub import Listed, Source
from sparkpin.fetch.model import Site
from sparkpin.fetch.model_files import TEXTS, download_folder, listing_of, mend_folder, require_readable
from sparkpin.fetch.store import HASH_WORKERS, check
from sparkpin.fetch.transfer import Piece
from sparkpin.pins import manifests, reading
from sparkpin.pins.schema import UNRESOLVED, LockedFile, ModelLock, ModelPin, PinnedRepository, RepositoryLock

AGAIN = "the same command again; if it stays, the Hub, or a proxy before it, gives wrong bytes"
BAD_NAME = "report this: the repository has a file name that is not allowed"
LOUD = 100_000_000  # bytes of a file from which on its hashing is reported


def lock_model(paths: Paths, name: str, say: Say, *, newest: bool = False) -> ModelLock:
    """Write `pins/models/<name>.lock`. Headers are fetched, the tensors that are taken, and of whole files small ones.

    What the former lock says of the same commits must still be so. newest: whatever commit it has. Raises ManifestError
    (also if a generated model's commit is not the pinned one), NetworkError, DiskError, IntegrityError, and
    CheckpointError if the repositories do not fit each other.
    """
    pin = manifests.load_model(paths.project, name)
    former = former_lock(paths.project, name, say)
    gguf = lock_gguf(paths, pin, pin.gguf, former.gguf if former else None, say) if pin.gguf else None
    with model.hold(paths, pin, say), model.sites(paths, pin, gguf, say) as site_of:
        locking = Locking(paths, pin, former, site_of, say, newest)
        entries = {key: locking.with_headers(key, locking.with_files(key)) for key in pin.repositories}
        say(f"planning what {name} takes")
        listings = {key: listing_of(paths, pin, key, entry) for key, entry in entries.items()}
        for key, places in donor_tensors(make_plan(listings, pin, locked_steps(pin))).items():
            spans = {info.name: (file, info.begin, info.end) for _, file, info in places}
            entries[key] = locking.with_parts(key, entries[key], "tensors", spans)
        lock = ModelLock(model=name, inputs=manifests.model_inputs(pin), gguf=gguf, repositories=entries)
        with files.atomic_file(paths.project / f"pins/models/{name}.lock") as file:
            file.write(manifests.lock_text(lock).encode())
        for entry in entries.values():
            shutil.rmtree(download_folder(paths, entry), ignore_errors=True)
    return lock


def former_lock(project: Path, name: str, say: Say) -> ModelLock | None:
    """None where there is none, and for one that cannot be read, which is reported: then nothing is compared."""
    if not (project / f"pins/models/{name}.lock").is_file():
        return None
    try:
        return manifests.former_model_lock(project, name)
    except ManifestError as error:
        say(f"{error.message}: what it said is not compared, and all hashes are believed again")
        return None


@dataclass(frozen=True)
class Locking:
    """What the parts of a lock have in common. newest: see `lock_model`."""

    paths: Paths
    pin: ModelPin
    former: ModelLock | None
    site_of: Callable[[str, str], Site]
    say: Say
    newest: bool

    @property
    def manifest(self) -> Path:
        return self.paths.project / f"pins/models/{self.pin.name}.yaml"

    def with_files(self, key: str) -> RepositoryLock:
        """The files of a repository; of a donor only those that the Hub has a SHA-256 of, its index and config."""
        repo = self.pin.repositories[key].repo
        revision, rows = self.list_files(key, self.pin.repositories[key])
        found = [{"name": file, "file": file, "size": size, "sha256": "0" * 64} for file, size, *_ in sorted(rows)]
        entry = reading.parse(  # before a name is a path
            RepositoryLock, {"repo": repo, "revision": revision, "files": found}, self.manifest, next_step=BAD_NAME
        )
        site = self.site_of(key, revision)
        texts = [row for row in rows if row.file in TEXTS or (key == self.pin.base and not row.sha256)]
        self.fetch([site.piece(row.file, row.size, sha256=row.sha256, git=row.git) for row in texts])
        hashes = {row.file: row.sha256 for row in rows if row.sha256}
        hashes |= {row.file: files.sha256_file(site.folder / row.file)[0] for row in texts}
        known = {row.file: row.model_copy(update={"sha256": hashes.get(row.file)}) for row in entry.files}
        for row in self.former_rows(key, entry, "files"):
            now, lock = known.get(row.file), self.manifest.with_suffix(".lock")
            step = f"{AGAIN}. If {lock} is what is wrong: rm {lock}, and lock again"
            sha256, size = (now.sha256 or row.sha256, now.size) if now else ("(no such file)", 0)
            check(row, sha256, size, f"{row.file} of {repo} at {revision[:12]}", step)
        return entry.model_copy(update={"files": [row for row in known.values() if row.sha256]})

    def list_files(self, key: str, repository: PinnedRepository) -> tuple[str, list[Listed]]:
        """The commit to lock, and its files: the pinned one, else the former lock's, else the newest."""
        former = self.former.repositories.get(key) if self.former else None
        former = former if former and former.repo == repository.repo else None
        if repository.folder:
            rows = list(hashed(self.paths.project / repository.folder, self.manifest, key, self.pin, self.say))
            if former:
                self.report_changes(key, {(row.file, row.sha256) for row in rows}, former)
            return commit_of(rows), rows
        if self.pin.is_made:
            from sparkpin.fetch.packed import files_of

            folder = self.site_of(key, repository.revision).source.folder
            assert folder
            return repository.revision, list(itertools.starmap(Listed, files_of(folder)))
        revision = repository.revision
        if revision == UNRESOLVED:
            revision = former.revision if former and not self.newest else "main"
        self.say(f"listing {repository.repo} at {revision}")
        commit, rows = Source(repository.repo, revision).list_files(self.say)
        if repository.revision == UNRESOLVED:
            self.say(f"{repository.repo}: the lock keeps {commit} (for the newest commit remove the lock first)")
        return commit if revision == "main" else revision, rows

    def report_changes(self, key: str, rows: set[tuple[str, str]], former: RepositoryLock) -> None:
        """A folder may change, and by mistake, too: then the lock takes it as it is, but not in silence."""
        if changed := ", ".join(sorted({file for file, _ in rows ^ {(row.file, row.sha256) for row in former.files}})):
            step = f"if that is not meant, put the files back, then: invoke lock --model {self.pin.name}"
            self.say(f"{key}: changed since the former lock, so checkpoints are built again: {changed}; {step}")

    def with_headers(self, key: str, entry: RepositoryLock) -> RepositoryLock:
        site, shards = self.site_of(key, entry.revision), [file for file in entry.files if is_shard(file.file)]
        ends = {row.file: row.size for row in self.former_rows(key, entry, "headers")}
        new = [row for row in shards if row.file not in ends]
        lengths = [site.piece(row.file, row.size, 0, min(row.size, PREFIX_BYTES)) for row in new]
        self.fetch(lengths)
        for piece in lengths:
            try:
                ends[piece.file] = PREFIX_BYTES + header_length(piece.target.read_bytes(), origin=piece.label)
                if ends[piece.file] > piece.size:
                    raise IntegrityError(f"{piece.label}: got a header that is longer than the file")
            except IntegrityError as error:
                raise IntegrityError(error.message, next_step=piece.source.next_step or OTHER) from None
        return self.with_parts(key, entry, "headers", {row.file: (row.file, 0, ends[row.file]) for row in shards})

    def with_parts(
        self, key: str, entry: RepositoryLock, kind: str, spans: Mapping[str, tuple[str, int, int]]
    ) -> RepositoryLock:
        """Headers or tensors of a repository, by file, begin and end, in the store, and in its part of the lock.

        Nobody publishes hashes of parts of files, so those that the former lock lacks are believed. They stay under
        `Piece.target` until all of them are there, so that a lock that is killed goes on from them.
        """
        site, sizes = self.site_of(key, entry.revision), {row.file: row.size for row in entry.files}
        hashes = {row.name: row.sha256 for row in self.former_rows(key, entry, kind)}
        pieces = {
            name: site.piece(file, sizes[file], begin, end, hashes.get(name, ""))
            for name, (file, begin, end) in spans.items()
        }
        self.fetch(list(pieces.values()))
        rows = []
        for name, piece in pieces.items():
            sha256, size = files.sha256_file(piece.target)
            place = site.store.path(sha256)
            place.parent.mkdir(parents=True, exist_ok=True)
            piece.target.replace(place)
            rows.append(LockedFile(name=name, file=piece.file, size=size, sha256=sha256))
        return entry.model_copy(update={kind: rows})

    def former_rows(self, key: str, entry: RepositoryLock, part: str) -> list[LockedFile]:
        """What the former lock says of this commit: it stays so, whatever the Hub gives now."""
        former = self.former.repositories.get(key) if self.former else None
        if former and (former.repo, former.revision) == (entry.repo, entry.revision):
            return list(getattr(former, part))
        return []

    def fetch(self, pieces: Sequence[Piece]) -> None:
        """Those that no earlier run brought."""
        with ThreadPoolExecutor(HASH_WORKERS) as pool:
            found = list(pool.map(Piece.is_here, pieces))
        absent = [piece for piece, is_here in zip(pieces, found, strict=True) if not is_here]
        model.fetch_pieces(self.paths, self.pin, absent, self.say, AGAIN)


def hashed(folder: Path, manifest: Path, key: str, pin: ModelPin, say: Say) -> Iterator[Listed]:
    """Every file of a folder that stands for a repository, except hidden ones (.git, .cache)."""
    if not folder.is_dir():
        raise ManifestError(manifest, f"repositories.{key}.folder", str(folder), "a folder with the repository's files")
    names = sorted(path.relative_to(folder) for path in folder.rglob("*"))
    names = [name for name in names if not any(part.startswith(".") for part in name.parts)]
    names = [name for name in names if is_shard(name.as_posix()) or not (folder / name).is_dir()]
    for name in names:
        require_readable(folder / name, mend_folder(folder, pin))

    def row(name: Path) -> Listed:
        size = (folder / name).stat().st_size
        if size >= LOUD:
            say(f"hashing {folder / name} ({terminal.size(size)})")
        return Listed(name.as_posix(), size, files.sha256_file(folder / name)[0])

    with ThreadPoolExecutor(HASH_WORKERS) as pool:
        yield from pool.map(row, names)


def commit_of(rows: Sequence[Listed]) -> str:
    """40 hex digits that stand for these files, as a commit does."""
    text = "".join(f"{row.sha256} {row.file}\n" for row in rows)
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
