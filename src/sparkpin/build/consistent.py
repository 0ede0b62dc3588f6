"""Whether a release's record is what was built: its key, its image, the build records of that image, its checkpoint;
and where the release comes from: built here, or brought by a bundle.

What serves, smokes or measures a release, bisects two, signs one, or makes it current, asks `require_consistent` first.
`invoke verify` asks the same, and more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from sparkpin.build.record import BuildRecord, is_imported, records_of
from sparkpin.checkpoint.content import Hashes, check_content, is_complete
from sparkpin.core.errors import CheckpointError, IntegrityError
from sparkpin.core.models import StrictModel
from sparkpin.core.names import is_plain
from sparkpin.core.paths import Paths
from sparkpin.core.tags import tag_of
from sparkpin.image.oci import digest_of
from sparkpin.releases.record import Release, Releases, read_optional, release_key

IMPORTS = "imports.json"  # in a release's evidence: the bundles that it came from
Hashing = Callable[[Path], object]  # gets each file that is hashed
SHOWN = 200  # characters of a value that is wrong


def is_brought(paths: Paths, release: Release) -> bool:
    """Whether a bundle brought the release, and this machine did not build it since."""
    return (Releases(paths).evidence(release) / IMPORTS).is_file()


def is_from_elsewhere(paths: Paths, release: Release) -> bool:
    """Whether a bundle brought the release, or the record of how one of its images was made: not to be run unasked."""
    return is_brought(paths, release) or any(is_imported(paths, record) for record in records_of(paths, release))


class Import(StrictModel):
    """A bundle that a release came from. checks: the lines of its verification."""

    file: str
    with_statement: bool
    with_store: bool
    checks: list[str]
    time: str


IMPORTS_FILE = TypeAdapter(list[Import])


def imports_of(paths: Paths, release: Release) -> list[Import]:
    """None of a release that was built here. ManifestError for what is no list of them."""
    path = Releases(paths).evidence(release) / IMPORTS
    step = f"echo [] > {path}; then import its bundle again"  # without the file it would count as built here
    return read_optional(path, IMPORTS_FILE, next_step=step) or []


def has_statement(paths: Paths, release: Release) -> bool:
    """Whether whoever made the release left a statement: every build does; a bundle may have come without one."""
    rows = imports_of(paths, release)
    return not rows or any(row.with_statement for row in rows)


def ready_checkpoint(paths: Paths, release: Release) -> Path | None:
    """The folder of the release's finished checkpoint."""
    folder = Releases(paths).checkpoint(release)
    return folder if is_complete(folder, release.checkpoint_key) else None


def require_consistent(
    paths: Paths, release: Release, *, finished: bool = False, hashing: Hashing | None = None, deep: bool = False
) -> list[Path]:
    """The files of its checkpoint that were hashed. IntegrityError where the record was changed, or names another image
    than was built from its inputs. CheckpointError where a file of its checkpoint was changed.

    Whoever may write to the data directory can write record, build record and key so that they fit; against that, only
    a signature helps (docs/evidence.md). finished: the checkpoint must be there and complete; else what is missing of
    it is made again later. hashing, deep: as of `check_content`.
    """
    try:
        check_key(release)
        records = records_of(paths, release)
        check_image(release, records[-1].config.encode())
        check_layers(release, records)
        check_records(release, records)
    except IntegrityError as error:
        step = f"invoke verify {release.tag}; restore {Releases(paths).record_path(release)}, or use another release"
        cause = f"the record of {release.tag} is not of what was built: {error.message}"
        raise IntegrityError(cause, next_step=error.next_step or step) from None
    folder = ready_checkpoint(paths, release)
    if folder is None:
        if finished:
            cause = f"the checkpoint of {release.tag} is gone or incomplete: {Releases(paths).checkpoint(release)}"
            step = f"invoke reproduce {release.tag} --keep makes it again; then the same command"
            raise CheckpointError(cause, next_step=step)
        return []
    hashes = Hashes.here(paths)
    hashed = check_content(folder, hashes, hashing, deep=deep)
    hashes.save()
    return hashed


def same(what: str, got: object, expected: object) -> None:
    if got != expected:
        raise IntegrityError(f"{what}: got {str(got)[:SHOWN]}, expected {str(expected)[:SHOWN]}")


def check_image(release: Release, config: bytes) -> str:
    same("config digest", digest_of(config), release.image)
    try:
        value: Any = json.loads(config)
        found = value["rootfs"]["diff_ids"], value["config"]["Labels"].get("sparkpin.key")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise IntegrityError(f"the configuration cannot be read: {error!r}") from None
    same("its layers and label sparkpin.key", found, (list(release.diff_ids), release.build_key))
    return f"config digest {release.image} as recorded"


def check_layers(release: Release, records: Sequence[BuildRecord]) -> str:
    if not release.diff_ids:
        raise IntegrityError("there is no layer")
    same("diff IDs", records[-1].diff_ids, list(release.diff_ids))
    return f"{len(release.diff_ids)} diff IDs, the same in release record, build record and configuration"


def check_key(release: Release) -> str:
    key = release_key(release.build_key, release.checkpoint_key, release.argv, release.env)
    same("key", release.key, key)
    same("tag", release.tag, tag_of(release.recipe, release.stage, key))
    if strange := [path for path in release.inputs if not is_plain(path)]:
        raise IntegrityError(f"names of project files: got {strange[0]!r}, expected relative paths that can be printed")
    return f"{key[:12]} follows from build key, checkpoint key, command and environment"


def check_records(release: Release, records: Sequence[BuildRecord]) -> str:
    for parent, record in zip((None, *records), records, strict=False):
        name, below = f"record of {record.stage}", parent.diff_ids if parent else []
        same(f"{name}: parent key", record.parent_key, parent and parent.key)
        same(f"{name}: root file system", record.rootfs is not None, parent is None)
        same(f"{name}: config digest", digest_of(record.config.encode()), record.config_digest)
        same(f"{name}: layers of its parent", record.diff_ids[: len(below)], below)
        if not {layer.diff_id for layer in record.layers} - {None} <= set(record.diff_ids[len(below) :]):
            raise IntegrityError(f"{name}: it names layers that its image does not have")
    last = records[-1]
    same("stage and stack", (last.stage, last.stack), (release.stage, release.stack))
    same("build key and image", (last.key, last.config_digest), (release.build_key, release.image))
    chain = f"a chain of {len(records)} from {records[0].stage} to {release.stage}" if records[1:] else release.stage
    return f"{chain}, which ends in this image"
