"""Writing a release as an OCI layout: collected, put into one file or a folder, and read again as an import reads it.

The same release with the same evidence gives the same bytes.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from sparkpin.build.consistent import has_statement
from sparkpin.build.record import BuildRecord, records_of
from sparkpin.core.errors import IntegrityError
from sparkpin.core.files import sha256_of
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say
from sparkpin.distribute import engines, layout, materials
from sparkpin.distribute.bundle import open_bundle
from sparkpin.distribute.layout import Row, WholeFile, slice_of
from sparkpin.distribute.materials import Part, model_inputs
from sparkpin.distribute.signing import Keys
from sparkpin.fetch.store import FETCH
from sparkpin.host.engine import Engine
from sparkpin.image import oci
from sparkpin.image.archive import Slice
from sparkpin.releases.kept_inputs import project_of
from sparkpin.releases.record import STATEMENT, Release, Releases, to_json

NOBODY = Keys()  # is trusted when it is read again: whom the other machine trusts is its own business


def export(paths: Paths, engine: Engine, release: Release, target: Path, *, store: bool = False) -> int:
    """Write the layout of a release to a file, or into an empty folder; its size in bytes. A file appears whole or not
    at all.

    store: with every wheel, package and model file. Raises IntegrityError for an input that is gone or damaged and for
    what every import would refuse, EngineError for an image that is gone, DiskError.
    """
    records = records_of(paths, release)
    rows = rows_of(paths, release, records, store=store)
    with engines.saved_layers(paths, engine, release) as layers:
        written = layout.write(target, layout_of(release, records, rows, layers))
    say("reading it as an import would")
    try:
        with open_bundle(target, NOBODY):
            return written
    except IntegrityError as error:
        shutil.rmtree(target) if target.is_dir() else target.unlink()
        why = f"{release.tag} is not exported, for every import would refuse it: {error.message}"
        raise IntegrityError(why, next_step=f"invoke verify {release.tag} prints all that is wrong") from None


def rows_of(paths: Paths, release: Release, records: Sequence[BuildRecord], *, store: bool = False) -> dict[str, Slice]:
    """Title of a row -> its bytes. The record is as it was built: what this machine made of it (current, passed) is its
    own business. IntegrityError for what is gone."""
    folder = Releases(paths).evidence(release)
    if has_statement(paths, release) and not (folder / STATEMENT).is_file():
        step = f"invoke verify {release.tag} --sign makes it"
        raise IntegrityError(f"{release.tag} has no statement", next_step=step)
    small = {layout.RELEASE: layout.as_json(to_json(dataclasses.replace(release, state="built", smoke=None)))}
    for record in records:
        small[f"{layout.IMAGES}{record.key}.json"] = layout.as_json(record.model_dump(mode="json", by_alias=True))
    small |= {name: (folder / name).read_bytes() for name in layout.EVIDENCE if (folder / name).is_file()}
    parts = materials.input_parts(release, records)
    if store:
        with project_of(paths, release) as project:
            parts += materials.stored_parts(records, model_inputs(project, release))
    require_there(paths, release, parts)
    files = {part.title: WholeFile(part.place(paths)) for part in parts}
    return {title: slice_of(data) for title, data in small.items()} | files


def require_there(paths: Paths, release: Release, parts: Sequence[Part]) -> None:
    for part in parts:
        path = part.place(paths)
        if not path.is_file() or part.size not in (None, path.stat().st_size):
            again = f"invoke build --recipe {release.recipe} --stage {release.stage} keeps it again, with the same pins"
            cause = f"{release.tag} was made from {part.what} (sha256={part.sha256}), which is not at {path}"
            raise IntegrityError(cause, next_step=FETCH if part.folder == layout.STORE else again)


def row_of(title: str, data: Slice) -> Row:
    """A kept file lies under its hash, which is in its title; whether it is so is found when it is read again."""
    sha256 = title.rpartition("/")[2] if isinstance(data, WholeFile) else sha256_of(data)
    return Row(title=title, digest=f"sha256:{sha256}", size=data.size)


def layout_of(
    release: Release, records: Sequence[BuildRecord], data: Mapping[str, Slice], layers: Mapping[str, Slice]
) -> dict[str, Slice]:
    """File of the layout -> its bytes, what is small first. data: of the rows; layers: diff ID -> tar."""
    config = records[-1].config.encode()
    image = [oci.OciLayer(diff_id, layers[diff_id].size) for diff_id in release.diff_ids]
    rows = [row_of(title, data[title]) for title in sorted(data)]
    made = layout.artifact(release.tag, rows, oci.manifest(config, image))
    small = layout.layout_files(release.tag, config, image, made)
    found = {name: slice_of(content) for name, content in small.items()}
    found |= {oci.blob(row.digest): data[row.title] for row in rows}
    return found | {oci.blob(diff_id): tar for diff_id, tar in layers.items()}
