"""Writing a release as an OCI layout: collected, put into one file or folder, and read again as an import reads it.

The same release with the same evidence gives the same bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from sparkpin.build.consistent import has_statement, ready_checkpoint
from sparkpin.build.record import BuildRecord, records_of
from sparkpin.checkpoint.content import RECORD
from sparkpin.core import files
from sparkpin.core.errors import CheckpointError, EngineError, IntegrityError
from sparkpin.core.paths import Paths
from sparkpin.core.progress import progress
from sparkpin.core.terminal import say, size
from sparkpin.distribute import bundle, layout
from sparkpin.distribute.imagecheck import saved_image
from sparkpin.distribute.materials import model_inputs
from sparkpin.distribute.signing import Keys
from sparkpin.fetch.model_files import blobs_of, repository_folder
from sparkpin.fetch.store import FETCH
from sparkpin.host.engine import Engine
from sparkpin.image import oci
from sparkpin.image.archive import BLOCK, END, Slice, file_header, padding
from sparkpin.pins.schema import LockedFile
from sparkpin.releases import current
from sparkpin.releases.kept_inputs import KeptInputs, project_of
from sparkpin.releases.record import STATEMENT, Release, Releases, to_json

Source = bytes | Path | Slice


@dataclass(frozen=True)
class BundleParts:
    """What a layout holds besides records, evidence and inputs."""

    store: bool = False  # every wheel, package and model file
    checkpoint: bool = False  # the finished checkpoint
    image: bool = True


def export(paths: Paths, connect: Callable[[], Engine], release: Release, target: Path, wanted: BundleParts) -> int:
    """Write the layout of a release to a file; its size in bytes. The file appears whole or not at all.

    connect: gives the engine, which is asked only when the image is wanted. Raises InputError for a file that is there
    or has no folder, IntegrityError for an input that is gone or damaged and for what every import would refuse,
    EngineError for an image that is gone, DiskError.
    """
    files.output_file("PLACE", str(target), like=f"{release.name}.tar")
    records = records_of(paths, release)
    rows = release_rows(paths, release, records, wanted)
    with contextlib.ExitStack() as stack:
        layers = saved_layers(paths, connect(), release, stack) if wanted.image else None
        found = layout_of(release, records, rows, layers)
        written = write(target, found)
    say("reading it as an import would")
    with importable(release, on_refusal=target.unlink), bundle.open_bundle(target, keys=Keys()):
        return written


@contextlib.contextmanager
def importable(release: Release, on_refusal: Callable[[], object]) -> Iterator[None]:
    """What every import would refuse is not exported. Whom the other machine trusts is its own business."""
    try:
        yield
    except IntegrityError as error:
        on_refusal()
        why = f"{release.tag} is not exported, for every import would refuse it: {error.message}"
        raise IntegrityError(why, next_step=f"invoke verify {release.tag} prints all that is wrong") from None


def release_rows(
    paths: Paths, release: Release, records: Sequence[BuildRecord], wanted: BundleParts
) -> dict[str, tuple[layout.Row, Source]]:
    """By title. IntegrityError for what is gone."""
    if has_statement(paths, release) and not (Releases(paths).evidence(release) / STATEMENT).is_file():
        step = f"invoke verify {release.tag} --sign makes it"
        raise IntegrityError(f"{release.tag} has no statement", next_step=step)
    found = record_rows(paths, release, records) | input_rows(paths, release, records)
    found |= stored_rows(paths, release, records) if wanted.store else {}
    return found | (checkpoint_rows(paths, release) if wanted.checkpoint else {})


def row_of(title: str, data: bytes) -> tuple[layout.Row, Source]:
    return layout.Row(title, oci.digest_of(data), len(data)), data


def record_rows(paths: Paths, release: Release, records: Sequence[BuildRecord]) -> dict[str, tuple[layout.Row, Source]]:
    """The record as it was built: what this machine made of it (current, passed) is its own business."""
    bare = dataclasses.replace(release, state="built", smoke=None)
    found = {layout.RELEASE: layout.as_json(to_json(bare))}
    for record in records:
        found[f"{layout.IMAGES}{record.key}.json"] = layout.as_json(record.model_dump(mode="json", by_alias=True))
    folder = Releases(paths).evidence(release)
    found |= {name: (folder / name).read_bytes() for name in layout.EVIDENCE if (folder / name).is_file()}
    return {title: row_of(title, data) for title, data in found.items()}


def input_rows(paths: Paths, release: Release, records: Sequence[BuildRecord]) -> dict[str, tuple[layout.Row, Source]]:
    kept = KeptInputs.of(paths).kept
    names = {row.sha256: f"{row.what} of {record.stage}" for record in records for row in record.context}
    names |= {sha256: name for name, sha256 in release.inputs.items()}
    found: dict[str, tuple[layout.Row, Source]] = {}
    for sha256 in bundle.kept_hashes(release, records):
        path = kept.path(sha256)
        if not path.is_file():
            step = f"invoke build --recipe {release.recipe} --stage {release.stage} keeps it again, if the pins are "
            missing = f"{names[sha256]} (sha256={sha256}), which is not in {kept.root}"
            raise IntegrityError(f"{release.tag} was made from {missing}", next_step=f"{step}still the same")
        found |= path_row(layout.INPUTS, sha256, path, path.stat().st_size)
    return found


def path_row(folder: str, sha256: str, path: Path, length: int) -> dict[str, tuple[layout.Row, Source]]:
    return {folder + sha256: (layout.Row(folder + sha256, f"sha256:{sha256}", length), path)}


def stored_rows(paths: Paths, release: Release, records: Sequence[BuildRecord]) -> dict[str, tuple[layout.Row, Source]]:
    """All that was fetched: for the images, and for the checkpoint."""
    store = KeptInputs.of(paths)
    wanted: dict[str, tuple[LockedFile, Path]] = {
        file.sha256: (file, store.holding(file).path(file.sha256)) for file in bundle.locked_files(records)
    }
    with project_of(paths, release) as project:
        for repository in model_inputs(project, release).repositories:
            folder = repository_folder(paths, repository)
            wanted |= {file.sha256: (file, folder / file.file) for file in repository.files}
            wanted |= {blob.sha256: (blob, store.fetched.path(blob.sha256)) for blob in blobs_of(repository)}
    if absent := [file for file, path in wanted.values() if not path.is_file() or path.stat().st_size != file.size]:
        raise IntegrityError(
            f"{len(absent)} of {len(wanted)} files that {release.tag} was made from are not in the cache, "
            f"the first: {absent[0].file} (sha256={absent[0].sha256})",
            next_step=FETCH,
        )
    found: dict[str, tuple[layout.Row, Source]] = {}
    for sha256, (file, path) in wanted.items():
        found |= path_row(layout.STORE, sha256, path, file.size)
    return found


def checkpoint_rows(paths: Paths, release: Release) -> dict[str, tuple[layout.Row, Source]]:
    folder = ready_checkpoint(paths, release)
    if folder is None:
        raise CheckpointError(
            f"the checkpoint of {release.tag} ({Releases(paths).checkpoint(release)}) is not there or not whole",
            next_step=f"invoke reproduce {release.tag} --keep makes it",
        )
    made = (folder / RECORD).read_bytes()
    found = {layout.CHECKPOINT: row_of(layout.CHECKPOINT, made)}
    for name, row in json.loads(made)["files"].items():
        found |= path_row(layout.CHECKPOINTS, row["sha256"], folder / name, row["size"])
    return found


def saved_layers(paths: Paths, engine: Engine, release: Release, stack: contextlib.ExitStack) -> dict[str, Slice]:
    """Diff ID -> tar, as the engine gives them out, which is not verified; there while `stack` is open."""
    ref = current.present_ref(engine, release)
    if ref is None:
        raise EngineError(
            f"the image of {release.tag} ({release.image}) is not in the engine",
            next_step=current.how_to_rebuild(release),
        )
    files.require_space(paths.work, release.size + release.size // 16, "an image's layers", "SPARKPIN_CACHE")
    with files.disk_errors(paths.work):
        saved = stack.enter_context(saved_image(paths, engine, release, ref))
    if tuple(saved.diff_ids) != release.diff_ids:
        raise EngineError(f"the engine saved another image than {release.tag}", next_step="the same command again")
    return dict(zip(release.diff_ids, saved.layers, strict=True))


def layout_of(
    release: Release,
    records: Sequence[BuildRecord],
    rows: Mapping[str, tuple[layout.Row, Source]],
    layers: Mapping[str, Slice] | None,
) -> dict[str, Source]:
    """File of the layout -> where its bytes are; what is small comes first."""
    config, sizes, image = records[-1].config.encode(), None, None
    if layers is not None:
        sizes = [oci.OciLayer(diff_id, layers[diff_id].size) for diff_id in release.diff_ids]
        image = oci.manifest(config, sizes)
    made = layout.artifact(release.tag, [row for row, _ in rows.values()], image)
    found: dict[str, Source] = dict(layout.layout_files(release.tag, config, sizes, made))
    found |= {oci.blob(row.digest): source for row, source in sorted(rows.values(), key=lambda one: one[0].title)}
    return found | {oci.blob(diff_id): tar for diff_id, tar in (layers or {}).items()}


def length_of(source: Source) -> int:
    if isinstance(source, Path):
        return source.stat().st_size
    return source.size if isinstance(source, Slice) else len(source)


def copied(source: Source, out: IO[bytes], written: Callable[[int], object] = lambda count: None) -> str:
    """Write all of it: its SHA-256, taken on the way, for it may lie where others write."""
    digest = hashlib.sha256()
    with contextlib.ExitStack() as stack:
        file: Any = source
        if not isinstance(source, Slice):
            opened = source.open("rb") if isinstance(source, Path) else io.BytesIO(source)
            file = stack.enter_context(opened)
        file.seek(0)
        while chunk := file.read(files.CHUNK):
            digest.update(chunk)
            out.write(chunk)
            written(len(chunk))
    return digest.hexdigest()


def write(target: Path, found: Mapping[str, Source]) -> int:
    """A layout as one tar. What is wrong with it is found when it is read again."""
    lengths = {name: length_of(source) for name, source in found.items()}
    total = sum(BLOCK + length + -length % BLOCK for length in lengths.values()) + len(END)
    files.require_space(target.parent, total, "the release's bytes", "the file")
    say(f"writing {target}: {len(found)} members, {size(total)}")
    with files.atomic_file(target) as out, progress(total) as written:
        for name, source in found.items():
            out.write(file_header(name, lengths[name]))
            copied(source, out, written)
            out.write(padding(lengths[name]))
        out.write(END)
    return total
