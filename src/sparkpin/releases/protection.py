"""Releases that a person protects from `prune` (`invoke keep`). Their records are not touched.

releases/<recipe>/<stage>-<key12>/kept.txt   why, in one line, which may be empty
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from sparkpin.core import files
from sparkpin.core.tags import OURS
from sparkpin.releases.record import Release, Releases

FILE = "kept.txt"


@dataclass(frozen=True)
class Protection:
    """since: ISO 8601, UTC; note: why, in one line; may be empty."""

    since: str
    note: str

    @classmethod
    def read(cls, file: Path) -> Protection:
        since = datetime.fromtimestamp(file.stat().st_mtime, UTC).isoformat(timespec="seconds")
        return cls(since, " ".join(file.read_text(encoding="utf-8", errors="replace").split()))

    @property
    def text(self) -> str:
        return f"kept: {self.note}" if self.note else "kept"


def protections_of(records: Releases, recipe: str) -> dict[str, Protection]:
    """Release tag -> protection. Takes no lock: each file is whole or absent."""
    found = {}
    for file in (records.root / recipe).glob(f"*/{FILE}"):
        with contextlib.suppress(FileNotFoundError):  # `keep --remove` runs at the same time
            found[f"{OURS}{recipe}:{file.parent.name}"] = Protection.read(file)
    return found


def protect(records: Releases, release: Release, note: str = "") -> Protection:
    """A new note takes the place of the old one, an empty one not."""
    file = records.evidence(release) / FILE
    with records.locked(release.recipe):
        if note.strip() or not file.is_file():
            with files.atomic_file(file) as out:
                out.write(f"{' '.join(note.split())}\n".encode())
        return Protection.read(file)


def unprotect(records: Releases, release: Release) -> bool:
    """Whether the release was protected."""
    file = records.evidence(release) / FILE
    with records.locked(release.recipe):
        was_protected = file.is_file()
        file.unlink(missing_ok=True)
    return was_protected
