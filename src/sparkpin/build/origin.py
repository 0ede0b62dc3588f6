"""Where a release comes from: built here, or brought by a bundle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sparkpin.build.record import is_imported, records_of
from sparkpin.checkpoint.content import is_complete, is_made_here
from sparkpin.core import files
from sparkpin.core.errors import IntegrityError
from sparkpin.core.paths import Paths
from sparkpin.releases.record import Release, Releases, now

IMPORTS = "imports.json"  # in a release's evidence: the bundles that it came from


def is_brought(paths: Paths, release: Release) -> bool:
    """Whether a bundle brought the release, and this machine did not build it since."""
    return (Releases(paths).evidence(release) / IMPORTS).is_file()


def made_with_statement(paths: Paths, release: Release) -> bool:
    """Whether whoever made the release left a statement: every build does; a bundle may have come without one."""
    try:
        rows = json.loads((Releases(paths).evidence(release) / IMPORTS).read_text(encoding="utf-8"))
        return any(row.get("with_statement", True) for row in rows)
    except (OSError, ValueError, TypeError, AttributeError):
        return True


def adopt(paths: Paths, release: Release) -> None:
    """The release was built here, whatever bundle brought it before."""
    (Releases(paths).evidence(release) / IMPORTS).unlink(missing_ok=True)


def is_from_elsewhere(paths: Paths, release: Release) -> bool:
    """Whether a bundle brought the release, or the record of how one of its images was made: not to be run unasked."""
    if is_brought(paths, release):
        return True
    try:
        return any(is_imported(paths, record.rendered) for record in records_of(paths, release))
    except IntegrityError:  # the record is lost: there is nothing to build of it
        return False


def ready_checkpoint(paths: Paths, release: Release) -> Path | None:
    """The folder of the release's finished checkpoint. One that a bundle brought is only such a release's."""
    folder, key = Releases(paths).checkpoint(release), release.checkpoint_key
    return folder if (is_complete if is_brought(paths, release) else is_made_here)(folder, key) else None


def add_row(path: Path, row: dict[str, Any]) -> None:
    """Add to a list of bundles, with the time; what it said about the same file goes."""
    try:
        rows = [old for old in json.loads(path.read_text(encoding="utf-8")) if old["file"] != row["file"]]
    except (OSError, ValueError, KeyError, TypeError):
        rows = []
    files.write_json(path, [*rows, {**row, "time": now()}])
