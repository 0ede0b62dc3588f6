"""Writing a release as an OCI layout: collected, put into one file, and read again as an import reads it.

The same release with the same evidence gives the same bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from sparkpin.build.consistent import has_statement, ready_checkpoint
from sparkpin.build.record import BuildRecord, records_of
from sparkpin.checkpoint.content import RECORD
from sparkpin.core import files
from sparkpin.core.errors import CheckpointError, IntegrityError
from sparkpin.core.paths import Paths
from sparkpin.core.progress import progress
from sparkpin.core.terminal import say, size
from sparkpin.distribute import bundle, engines, layout, materials
from sparkpin.distribute.layout import Row
from sparkpin.distribute.materials import Part, model_inputs
from sparkpin.distribute.signing import Keys
from sparkpin.distribute.verify import slice_of
from sparkpin.fetch.store import FETCH
from sparkpin.host.engine import Engine
from sparkpin.image import oci
from sparkpin.image.archive import BLOCK, END, Slice, file_header, padding
from sparkpin.releases.kept_inputs import project_of
from sparkpin.releases.record import SIGNATURE, STATEMENT, Release, Releases, to_json

Source = Path | Slice
Sources = Mapping[str, Source]
NOBODY = Keys()  # is trusted when it is read again: whom the other machine trusts is its own business


@dataclass(frozen=True)
class BundleParts:
    """What a layout holds besides records, evidence and inputs."""

    store: bool = False  # every wheel, package and model file
    checkpoint: bool = False  # the finished checkpoint
    image: bool = True


def export(paths: Paths, connect: Callable[[], Engine], release: Release, target: Path, wanted: BundleParts) -> int:
    """Write the layout of a release to a file, or into an empty folder; its size in bytes. A file appears whole or not
    at all.

    connect: gives the engine, which is asked only when the image is wanted. Raises IntegrityError for an input that is
    gone or damaged and for what every import would refuse, EngineError for an image that is gone, DiskError.
    """
    records = records_of(paths, release)
    sources = row_sources(paths, release, records, wanted)
    with engines.saved_layers(paths, connect(), release) if wanted.image else contextlib.nullcontext() as layers:
        written = write(target, layout_of(release, records, sources, layers))
    say("reading it as an import would")
    try:
        if target.is_dir():
            with layout.refusing(target):
                bundle.verified(target, layout.read_folder(target), NOBODY)
        else:
            with bundle.open_bundle(target, keys=NOBODY):
                pass
        return written
    except IntegrityError as error:
        if target.is_file():
            target.unlink()
        why = f"{release.tag} is not exported, for every import would refuse it: {error.message}"
        raise IntegrityError(why, next_step=f"invoke verify {release.tag} prints all that is wrong") from None


def row_sources(paths: Paths, release: Release, records: Sequence[BuildRecord], wanted: BundleParts) -> Sources:
    """Title of a row -> where its bytes are. The record is as it was built: what this machine made of it (current,
    passed) is its own business. IntegrityError for what is gone."""
    folder = Releases(paths).evidence(release)
    if has_statement(paths, release) and not (folder / STATEMENT).is_file():
        step = f"invoke verify {release.tag} --sign makes it"
        raise IntegrityError(f"{release.tag} has no statement", next_step=step)
    bare = dataclasses.replace(release, state="built", smoke=None)
    small = {layout.RELEASE: layout.as_json(to_json(bare))}
    for record in records:
        small[f"{layout.IMAGES}{record.key}.json"] = layout.as_json(record.model_dump(mode="json", by_alias=True))
    small |= {name: (folder / name).read_bytes() for name in layout.EVIDENCE if (folder / name).is_file()}
    parts = materials.input_parts(release, records)
    if wanted.store:
        with project_of(paths, release) as project:
            parts += materials.stored_parts(records, model_inputs(project, release))
    if wanted.checkpoint:
        if SIGNATURE in small:
            say("no signature covers the finished checkpoint: an import with --require-signature refuses this bundle")
        made = checkpoint_record(paths, release)
        small[layout.CHECKPOINT] = made
        parts += materials.checkpoint_parts(release, made)
    require_there(paths, release, parts)
    found: dict[str, Source] = {title: slice_of(data) for title, data in small.items()}
    return found | {part.title: part.place(paths, release) for part in parts}


def require_there(paths: Paths, release: Release, parts: Sequence[Part]) -> None:
    for part in parts:
        path = part.place(paths, release)
        if not path.is_file() or part.size not in (None, path.stat().st_size):
            again = f"invoke build --recipe {release.recipe} --stage {release.stage} keeps it again, with the same pins"
            cause = f"{release.tag} was made from {part.what} (sha256={part.sha256}), which is not at {path}"
            raise IntegrityError(cause, next_step=FETCH if part.folder == layout.STORE else again)


def checkpoint_record(paths: Paths, release: Release) -> bytes:
    folder = ready_checkpoint(paths, release)
    if folder is None:
        cause = f"the checkpoint of {release.tag} ({Releases(paths).checkpoint(release)}) is not there or not whole"
        raise CheckpointError(cause, next_step=f"invoke reproduce {release.tag} --keep makes it")
    return (folder / RECORD).read_bytes()


def row_of(title: str, source: Source) -> Row:
    """A file lies under its hash, which is in its title; whether it is so is found when the layout is read again."""
    sha256 = files.sha256_of(source) if isinstance(source, Slice) else title.rpartition("/")[2]
    return Row(title=title, digest=f"sha256:{sha256}", size=length_of(source))


def layout_of(
    release: Release, records: Sequence[BuildRecord], sources: Sources, layers: Mapping[str, Slice] | None
) -> Sources:
    """File of the layout -> where its bytes are, what is small first. layers: diff ID -> tar, None where the image
    stays behind."""
    config = records[-1].config.encode()
    sizes = [oci.OciLayer(diff_id, layers[diff_id].size) for diff_id in release.diff_ids] if layers else None
    rows = [row_of(title, sources[title]) for title in sorted(sources)]
    made = layout.artifact(release.tag, rows, oci.manifest(config, sizes) if sizes else None)
    small = layout.layout_files(release.tag, config, sizes, made)
    found: dict[str, Source] = {name: slice_of(data) for name, data in small.items()}
    found |= {oci.blob(row.digest): sources[row.title] for row in rows}
    return found | {oci.blob(diff_id): tar for diff_id, tar in (layers or {}).items()}


def length_of(source: Source) -> int:
    return source.size if isinstance(source, Slice) else source.stat().st_size


def copied(source: Source, out: IO[bytes], written: Callable[[int], object] = lambda count: None) -> str:
    """Write all of it: its SHA-256, taken on the way, for it may lie where others write."""
    digest = hashlib.sha256()
    with source.open("rb") if isinstance(source, Path) else contextlib.nullcontext(source) as file:
        file.seek(0)
        while chunk := file.read(files.CHUNK):
            digest.update(chunk)
            out.write(chunk)
            written(len(chunk))
    return digest.hexdigest()


def write(target: Path, found: Sources) -> int:
    """What is wrong with it is found when it is read again."""
    lengths = {name: length_of(source) for name, source in found.items()}
    total = sum(BLOCK + length + -length % BLOCK for length in lengths.values()) + len(END)
    files.require_space(target.parent, total, "the release's bytes", "the file")
    say(f"writing {target}: {len(found)} members, {size(total)}")
    if target.is_dir():
        for name, source in found.items():
            with files.atomic_file(target / name) as out:
                copied(source, out)
        return total
    with files.atomic_file(target) as out, progress(total) as written:
        for name, source in found.items():
            out.write(file_header(name, lengths[name]))
            copied(source, out, written)
            out.write(padding(lengths[name]))
        out.write(END)
    return total
