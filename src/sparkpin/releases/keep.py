"""Pins: releases that a person wants to keep, whatever `prune` is told. Their records are not touched.

releases/<recipe>/pinned.json: {"schema": 1, "pins": {TAG: {"since": ..., "note": ...}}}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from sparkpin.core import files
from sparkpin.core.errors import ManifestError
from sparkpin.pins.schema import StrictModel
from sparkpin.releases.record import SCHEMA, Release, Releases, check_schema, now, read_json

FILE = "pinned.json"
REPAIR = "mend the file, or remove it and run `invoke keep TAG` again for each release to keep"


class Pin(StrictModel):
    """since: ISO 8601, UTC; note: why, in one line; may be empty."""

    since: str
    note: str

    @property
    def text(self) -> str:
        return f"kept: {self.note}" if self.note else "kept"


PINS = TypeAdapter(dict[str, Pin])


def pins_of(records: Releases, recipe: str) -> dict[str, Pin]:
    """Release tag -> pin. Takes no lock: the file is whole or absent. ManifestError when it is damaged."""
    path = pins_file(records, recipe)
    try:
        value = read_json(path)
    except FileNotFoundError:
        return {}
    check_schema(path, value)
    try:
        return PINS.validate_python(value.get("pins"))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(("pins", *map(str, first["loc"])))
        raise ManifestError(path, key, first["input"], first["msg"], next_step=REPAIR) from None


def all_pins(records: Releases) -> dict[str, Pin]:
    return {tag: pin for recipe in records.recipes() for tag, pin in pins_of(records, recipe).items()}


def pin(records: Releases, tag: str, note: str = "") -> tuple[Release, Pin]:
    """Pin a release. One that is pinned keeps its date; a new note takes the place of the old one, an empty one not."""
    with records.locked(records.get(tag).recipe):
        release = records.get(tag)
        pins = pins_of(records, release.recipe)
        old = pins.get(release.tag)
        kept = old or Pin(since=now(), note="")
        made = Pin(since=kept.since, note=" ".join(note.split()) or kept.note)
        write(records, release.recipe, {**pins, release.tag: made})
    return release, made


def unpin(records: Releases, tag: str) -> bool:
    """Whether the release was pinned."""
    with records.locked(records.get(tag).recipe):
        release = records.get(tag)
        pins = pins_of(records, release.recipe)
        if release.tag not in pins:
            return False
        write(records, release.recipe, {name: value for name, value in pins.items() if name != release.tag})
    return True


def pins_file(records: Releases, recipe: str) -> Path:
    return records.root / recipe / FILE


def write(records: Releases, recipe: str, pins: Mapping[str, Pin]) -> None:
    """The caller holds the recipe's lock."""
    value: dict[str, Any] = {"schema": SCHEMA, "pins": PINS.dump_python(dict(pins), mode="json")}
    files.write_json(pins_file(records, recipe), value)
