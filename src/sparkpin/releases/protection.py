"""Releases that a person protects from `prune` (`invoke keep`). Their records are not touched.

releases/<recipe>/protected.json: {"schema": 1, "releases": {TAG: {"since": ..., "note": ...}}}
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from sparkpin.core import files
from sparkpin.core.models import StrictModel
from sparkpin.releases.record import Release, Releases, now, read_optional

FILE = "protected.json"


class Protection(StrictModel):
    """since: ISO 8601, UTC; note: why, in one line; may be empty."""

    since: str
    note: str

    @property
    def text(self) -> str:
        return f"kept: {self.note}" if self.note else "kept"


class Protections(StrictModel):
    """The file. releases: tag -> protection."""

    schema_: Annotated[Literal[1], Field(alias="schema")] = 1
    releases: dict[str, Protection]


PROTECTIONS = TypeAdapter(Protections)


def protections_of(records: Releases, recipe: str) -> dict[str, Protection]:
    """Release tag -> protection. Takes no lock: the file is whole or absent. ManifestError when it is damaged."""
    path = protections_file(records, recipe)
    step = f"correct {path}, or remove it and run `invoke keep TAG` again for each release to keep"
    found = read_optional(path, PROTECTIONS, next_step=step)
    return found.releases if found else {}


def protect(records: Releases, release: Release, note: str = "") -> Protection:
    """One that is protected keeps its date; a new note takes the place of the old one, an empty one not."""
    with records.locked(release.recipe):
        known = protections_of(records, release.recipe)
        old = known.get(release.tag) or Protection(since=now(), note="")
        new = Protection(since=old.since, note=" ".join(note.split()) or old.note)
        write_protections(records, release.recipe, {**known, release.tag: new})
    return new


def unprotect(records: Releases, release: Release) -> bool:
    """Whether the release was protected."""
    with records.locked(release.recipe):
        known = protections_of(records, release.recipe)
        if was_protected := known.pop(release.tag, None) is not None:
            write_protections(records, release.recipe, known)
    return was_protected


def protections_file(records: Releases, recipe: str) -> Path:
    return records.root / recipe / FILE


def write_protections(records: Releases, recipe: str, protections: dict[str, Protection]) -> None:
    """The caller holds the recipe's lock."""
    value = PROTECTIONS.dump_python(Protections(releases=protections), mode="json", by_alias=True)
    files.write_json(protections_file(records, recipe), value)
