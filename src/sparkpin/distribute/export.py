"""Writing a release as an OCI layout: collected, put into one file or a folder, and read again as an import reads it.

The same release with the same evidence gives the same bytes.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from sparkpin.core.errors import IntegrityError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say
from sparkpin.distribute import engines, layout, materials
from sparkpin.distribute.bundle import open_bundle
from sparkpin.distribute.layout import WholeFile
from sparkpin.distribute.signing import Keys
from sparkpin.distribute.verify import Claimed, evidence_of
from sparkpin.fetch.store import FETCH
from sparkpin.host.engine import Engine
from sparkpin.image import oci
from sparkpin.image.archive import Slice
from sparkpin.releases.kept_inputs import project_of
from sparkpin.releases.record import STATEMENT, Release

NOBODY = Keys()  # is trusted when it is read again: whom the other machine trusts is its own business


def export(paths: Paths, engine: Engine, release: Release, target: Path, *, store: bool = False) -> int:
    """Write the layout of a release to a file, or into an empty folder; its size in bytes. A file appears whole or not
    at all.

    store: with every wheel, package and model file. Raises IntegrityError for an input that is gone or damaged and for
    what every import would refuse, EngineError for an image that is gone, DiskError.
    """
    claimed = evidence_of(paths, release)
    if claimed.attested and STATEMENT not in claimed.data:
        step = f"invoke verify {release.tag} --sign makes it"
        raise IntegrityError(f"{release.tag} has no statement", next_step=step)
    data, parts = dict(claimed.data), materials.input_parts(release, claimed.records)
    if store:
        with project_of(paths, release) as project:
            stored = materials.stored_parts(claimed.records, materials.model_inputs(project, release))
        data |= {part.title: WholeFile(part.place(paths)) for part in stored if part.place(paths).is_file()}
        parts += stored
    if lacking := [part for part in parts if part.title not in data]:
        part, again = lacking[0], f"invoke build --recipe {release.recipe} --stage {release.stage} keeps it again"
        cause = f"{release.tag} was made from {part.what} (sha256={part.sha256}), which is not at {part.place(paths)}"
        raise IntegrityError(cause, next_step=FETCH if part.folder == layout.STORE else again)
    with engines.saved_layers(paths, engine, release) as layers:
        written = layout.write(target, layout_of(claimed, data, layers))
    say("reading it as an import would")
    try:
        with open_bundle(target, NOBODY):
            return written
    except IntegrityError as error:
        shutil.rmtree(target) if target.is_dir() else target.unlink()
        why = f"{release.tag} is not exported, for every import would refuse it: {error.message}"
        raise IntegrityError(why, next_step=f"invoke verify {release.tag} prints all that is wrong") from None


def layout_of(claimed: Claimed, data: Mapping[str, Slice], layers: Mapping[str, Slice]) -> dict[str, Slice]:
    """File of the layout -> its bytes, what is small first. data: of the rows; layers: diff ID -> tar."""
    release, config = claimed.release, claimed.records[-1].config.encode()
    image = [oci.OciLayer(diff_id, layers[diff_id].size) for diff_id in release.diff_ids]
    rows = [layout.row_of(title, data[title]) for title in sorted(data)]
    made = layout.artifact(release.tag, rows, oci.manifest(config, image))
    small = layout.layout_files(release.tag, config, image, made)
    found = {name: layout.slice_of(content) for name, content in small.items()}
    found |= {oci.blob(row.digest): data[row.title] for row in rows}
    return found | {oci.blob(diff_id): tar for diff_id, tar in layers.items()}
