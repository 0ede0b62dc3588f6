"""Writing a bundle: what a release consists of, collected, checked and put into one file. See `bundle`.

The same release with the same evidence gives the same bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkpin.build.consistent import IMPORTS, has_statement, ready_checkpoint
from sparkpin.build.record import BuildRecord, layer_file, records_of
from sparkpin.checkpoint.content import RECORD
from sparkpin.core import files
from sparkpin.core.errors import CheckpointError, EngineError, IntegrityError
from sparkpin.core.paths import Paths
from sparkpin.core.progress import progress
from sparkpin.core.terminal import Say, printable
from sparkpin.distribute import form
from sparkpin.distribute.imagecheck import saved_image
from sparkpin.distribute.materials import model_inputs
from sparkpin.distribute.signing import Keys
from sparkpin.fetch.model_files import blobs_of, repository_folder
from sparkpin.fetch.store import FETCH
from sparkpin.host.engine import Engine
from sparkpin.image import oci
from sparkpin.image.archive import END, Slice, file_header, padding
from sparkpin.pins.schema import LockedFile
from sparkpin.releases import current
from sparkpin.releases.kept_inputs import KeptInputs, project_of
from sparkpin.releases.record import SIGNATURE, STATEMENT, Release, Releases, to_json


@dataclass(frozen=True)
class BundleParts:
    """What a bundle holds besides records, evidence and inputs."""

    store: bool = False  # every wheel, package and model file
    checkpoint: bool = False  # the finished checkpoint
    image: bool = True


@dataclass(frozen=True)
class BundlePiece:
    """One member to be written."""

    name: str
    size: int
    sha256: str
    source: bytes | Path | Slice
    what: str  # its name for an error
    next_step: str = "invoke verify finds what is damaged"  # what brings it back

    def data(self, stack: contextlib.ExitStack) -> Slice:
        """Its bytes; a file stays open as long as `stack`."""
        if isinstance(self.source, Slice):
            return self.source
        file: Any = io.BytesIO(self.source) if isinstance(self.source, bytes) else self.source.open("rb")
        return Slice(stack.enter_context(file), 0, self.size)


def export(
    paths: Paths, connect: Callable[[], Engine], release: Release, target: Path, wanted: BundleParts, say: Say
) -> int:
    """Write the bundle of a release; its size in bytes. The file appears whole or not at all.

    connect: gives the engine, which is asked only when the image is wanted. Raises InputError for a file that is there
    or has no folder, IntegrityError for an input that is gone or damaged and for what every import would refuse,
    EngineError for an image that is gone or damaged, DiskError.
    """
    files.output_file("PLACE", str(target), like=f"{release.name}.tar")
    records = records_of(paths, release)
    pieces = record_pieces(paths, release, records, say)
    if wanted.store:
        pieces += store_pieces(paths, release, records)
    if wanted.checkpoint:
        pieces += checkpoint_pieces(paths, release)
        if (Releases(paths).evidence(release) / SIGNATURE).is_file():
            say(
                "no signature is over a finished checkpoint: where one is required (--require-signature) the other "
                "machine refuses this bundle; --with-store instead takes along what the checkpoint is made from"
            )
    say("reading it as an import would")
    require_importable(paths, release, target, wanted, pieces)
    with contextlib.ExitStack() as stack:
        if wanted.image:
            known = sum(piece.size for piece in pieces)
            pieces += image_pieces(paths, connect(), release, records, target, known, stack, say)
        return write(target, release, wanted, pieces, say)


def require_importable(
    paths: Paths, release: Release, target: Path, wanted: BundleParts, pieces: Sequence[BundlePiece]
) -> None:
    """IntegrityError, before anything is written, for what `verify` or every import would find wrong.

    The image is not in it: it is compared with the record when it is read. Whom the other machine trusts is its own
    business.
    """
    verify_next = f"invoke verify {release.tag} tells all that is wrong"
    if has_statement(paths, release) and not (Releases(paths).evidence(release) / STATEMENT).is_file():
        raise IntegrityError(
            f"{release.tag} has no statement", next_step=f"invoke verify {release.tag} --sign makes it"
        )
    index = index_of(release, dataclasses.replace(wanted, image=False), pieces)
    try:
        with contextlib.ExitStack() as stack, form.refusing():
            form.read_bundle(target, index, Members(pieces, stack), Keys())
    except form.Refused as refusal:
        why = printable(f"{release.tag} is not exported, for every import would refuse it: {refusal}")
        raise IntegrityError(why, next_step=verify_next) from None


def index_of(release: Release, wanted: BundleParts, pieces: Sequence[BundlePiece]) -> form.BundleIndex:
    rows = [form.MemberRow(name=piece.name, size=piece.size, sha256=piece.sha256) for piece in pieces]
    return form.BundleIndex(tag=release.tag, members=rows, **dataclasses.asdict(wanted))


class Members(Mapping[str, Slice]):
    """Pieces as the members of a bundle that is open; a file is opened when it is asked for."""

    def __init__(self, pieces: Sequence[BundlePiece], stack: contextlib.ExitStack) -> None:
        self.pieces, self.stack = {piece.name: piece for piece in pieces}, stack
        self.opened: dict[str, Slice] = {}

    def __getitem__(self, name: str) -> Slice:
        if name not in self.opened:
            self.opened[name] = self.pieces[name].data(self.stack)
        return self.opened[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.pieces)

    def __len__(self) -> int:
        return len(self.pieces)


def record_pieces(paths: Paths, release: Release, records: Sequence[BuildRecord], say: Say) -> list[BundlePiece]:
    """What every bundle holds."""
    return [*release_pieces(paths, release, records, say), *input_pieces(paths, release, records)]


def release_pieces(
    paths: Paths, release: Release, records: Sequence[BuildRecord], say: Say = lambda line: None
) -> list[BundlePiece]:
    """The record as it was built: what this machine made of it (current, passed) is told by its evidence."""
    bare = dataclasses.replace(release, state="built", smoke=None)
    pieces = [of_bytes(form.RELEASE, as_json(to_json(bare)))]
    for record in records:
        value = record.model_dump(mode="json", by_alias=True)
        pieces.append(of_bytes(f"{form.IMAGES}{record.key}.json", as_json(value)))
    folder = Releases(paths).evidence(release)
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        member = f"{form.EVIDENCE}{name}"
        if not path.is_file() or name == IMPORTS or files.PARTIAL in name:  # half-written
            continue
        if re.fullmatch(form.NAME, member) and len(member) <= form.NAME_LIMIT:
            pieces.append(of_file(member, path))
        else:
            say(f"left out: {name!r} of the evidence; a bundle takes plain names of {form.NAME_LIMIT} bytes at most")
    for diff_id in dict.fromkeys(release.diff_ids):
        pieces.append(of_file(form.listing(diff_id), layer_file(paths, diff_id)))
    return pieces


def as_json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def of_bytes(name: str, data: bytes, what: str = "") -> BundlePiece:
    return BundlePiece(name, len(data), hashlib.sha256(data).hexdigest(), data, what or name)


def of_file(name: str, path: Path) -> BundlePiece:
    """A small file that nothing else says the hash of."""
    try:
        return of_bytes(name, path.read_bytes(), str(path))
    except FileNotFoundError:
        raise IntegrityError(f"{path} is missing", next_step="invoke build makes it anew") from None


def input_pieces(paths: Paths, release: Release, records: Sequence[BuildRecord]) -> list[BundlePiece]:
    kept = KeptInputs.of(paths).kept
    names = {row.sha256: f"{row.what} of {record.stage}" for record in records for row in record.context}
    names |= {sha256: name for name, sha256 in release.inputs.items()}
    pieces = []
    for sha256 in form.kept_hashes(release, records):
        path = kept.path(sha256)
        if not path.is_file():
            raise IntegrityError(
                f"{release.tag} was made from {names[sha256]} (sha256={sha256}), which is not in {kept.root}",
                next_step=f"invoke build --recipe {release.recipe} --stage {release.stage} keeps it again, "
                "if the pins are still the same",
            )
        pieces.append(BundlePiece(f"{form.INPUTS}{sha256}", path.stat().st_size, sha256, path, names[sha256]))
    return pieces


def store_pieces(paths: Paths, release: Release, records: Sequence[BuildRecord]) -> list[BundlePiece]:
    """All that was fetched: for the images, and for the checkpoint."""
    found: dict[str, tuple[LockedFile, Path]] = {}
    store = KeptInputs.of(paths)
    for file in form.locked_files(records):
        found[file.sha256] = file, store.holding(file).path(file.sha256)
    with project_of(paths, release) as project:
        for repository in model_inputs(project, release).repositories:
            for file in repository.files:
                found[file.sha256] = file, repository_folder(paths, repository) / file.file
            for blob in blobs_of(repository):
                found[blob.sha256] = blob, store.fetched.path(blob.sha256)
    if absent := [file for file, path in found.values() if not path.is_file() or path.stat().st_size != file.size]:
        raise IntegrityError(
            f"{len(absent)} of {len(found)} files that {release.tag} was made from are not in the cache, "
            f"the first: {absent[0].file} (sha256={absent[0].sha256})",
            next_step=FETCH,
        )
    return [
        BundlePiece(f"{form.STORE}{sha256}", file.size, sha256, path, str(path), FETCH)
        for sha256, (file, path) in sorted(found.items())
    ]


def checkpoint_pieces(paths: Paths, release: Release) -> list[BundlePiece]:
    folder = ready_checkpoint(paths, release)
    if folder is None:
        raise CheckpointError(
            f"the checkpoint of {release.tag} ({Releases(paths).checkpoint(release)}) is not there or not whole",
            next_step=f"invoke reproduce {release.tag} --keep makes it",
        )
    made = (folder / RECORD).read_bytes()
    rows = {row["sha256"]: (row["size"], folder / name) for name, row in json.loads(made)["files"].items()}
    return [
        of_bytes(form.CHECKPOINT, made),
        *(
            BundlePiece(f"{form.CHECKPOINTS}{sha256}", size, sha256, path, str(path), "invoke build --checkpoint-only")
            for sha256, (size, path) in sorted(rows.items())
        ),
    ]


def image_pieces(
    paths: Paths,
    engine: Engine,
    release: Release,
    records: Sequence[BuildRecord],
    target: Path,
    known: int,
    stack: contextlib.ExitStack,
    say: Say,
) -> list[BundlePiece]:
    """The image as an OCI layout; its layers lie in a temporary file while `stack` is open. known: bytes before it."""
    image = release.size + release.size // 16  # a tar is somewhat larger than what it holds
    work, out = files.existing_parent(paths.work), files.existing_parent(target.parent)
    together = work.stat().st_dev == out.stat().st_dev
    files.require_space(paths.work, image + (image + known if together else 0), "an image's layers", "SPARKPIN_CACHE")
    if not together:
        require_room(target, image + known)
    layers = saved_layers(paths, engine, release, stack, say)
    sizes = [oci.OciLayer(diff_id, layers[diff_id].size) for diff_id in release.diff_ids]
    pieces = [of_bytes(*item) for item in oci.layout(records[-1].config.encode(), sizes, release.tag).items()]
    again = f"the engine's image is damaged: {current.how_to_rebuild(release)}"
    for diff_id, tar in layers.items():
        sha256 = diff_id.removeprefix("sha256:")
        pieces.append(
            BundlePiece(oci.blob(diff_id), tar.size, sha256, tar, f"layer {diff_id} as the engine saved it", again)
        )
    return pieces


def saved_layers(
    paths: Paths, engine: Engine, release: Release, stack: contextlib.ExitStack, say: Say
) -> dict[str, Slice]:
    """Diff ID -> tar, as the engine gives them out, which is not verified; there while `stack` is open."""
    ref = current.present_ref(engine, release)
    if ref is None:
        raise EngineError(
            f"the image of {release.tag} ({release.image}) is not in the engine",
            next_step=current.how_to_rebuild(release),
        )
    with files.disk_errors(paths.work):
        saved = stack.enter_context(saved_image(paths, engine, release, ref, say))
    if tuple(saved.diff_ids) != release.diff_ids:
        raise EngineError(f"the engine saved another image than {release.tag}", next_step="the same command again")
    return dict(zip(release.diff_ids, saved.layers, strict=True))


def require_room(target: Path, needed: int) -> None:
    files.require_space(target.parent, needed, "the bundle's bytes", "the file")


def write(target: Path, release: Release, wanted: BundleParts, pieces: Sequence[BundlePiece], say: Say) -> int:
    """One pass over the pieces, each compared with its hash as it is written."""
    index = index_of(release, wanted, pieces)
    total = sum(form.space_of(piece.size) for piece in pieces)
    require_room(target, total)
    say(f"writing {target}: {len(pieces)} members, {total / 1e6:.1f} MB")
    with files.atomic_file(target) as out, progress(say, total) as written:
        for piece in (of_bytes(form.INDEX, index.text), *pieces):
            out.write(file_header(piece.name, piece.size))
            with contextlib.ExitStack() as stack:
                sha256, size = form.copied(piece.data(stack), out, written)
            if (size, sha256) != (piece.size, piece.sha256):
                raise IntegrityError.mismatch(
                    piece.what,
                    expected_size=piece.size,
                    expected_sha256=piece.sha256,
                    size=size,
                    sha256=sha256,
                    next_step=piece.next_step,
                )
            out.write(padding(piece.size))
        out.write(END)
        return out.tell()
