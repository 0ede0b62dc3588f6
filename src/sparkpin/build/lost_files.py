"""Where a locked file can be had that its index or mirror no longer offers: in the bundle of a release made from it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sparkpin.build.origin import EXPORTS, IMPORTS
from sparkpin.build.record import records_of
from sparkpin.core.errors import SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.pins.schema import LockedFile
from sparkpin.releases.record import Release, Releases, read_record


def how_to_get(paths: Paths, lost: Sequence[LockedFile]) -> str:
    """What to type next, in one line. Reads the records of this machine's releases, and nothing else."""
    left = {file.sha256: file.file for file in lost}
    parts = []
    for release, held, bundle in sightings(paths, frozenset(left)):
        here = [left.pop(sha256) for sha256 in list(left) if sha256 in held]
        if here:
            what = "it" if len(lost) == 1 else few(here)
            parts.append(f"{release.tag} was made from {what}: {bundle or export_of(release)}")
    if left:
        names = "it" if len(lost) == 1 else few(list(left.values()))
        parts.append(
            f"no release on this machine was made from {names}: `invoke import` a bundle that another machine exported "
            "with its store, or copy that machine's store (SPARKPIN_CACHE)"
        )
    parts.append(
        "images that were published need no such file: `invoke up --from oci://HOST/NAME`, or `invoke import oci://HOST/NAME:TAG`"
    )
    return "; ".join([*parts, "or `invoke lock` takes what is offered now"])


def few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def sightings(paths: Paths, wanted: frozenset[str]) -> list[tuple[Release, frozenset[str], str]]:
    """The releases that were made from any of these SHA-256, from which ones, and how a bundle brings them back.

    First those with a bundle, then by how many they had, then the newest.
    """
    records = Releases(paths)
    newest = sorted(readable(records), key=lambda release: release.age, reverse=True)
    held = ((release, wanted & made_from(paths, release)) for release in newest)
    found = [(release, files, bundle_of(records.evidence(release))) for release, files in held if files]
    return sorted(found, key=lambda row: (not row[2], -len(row[1])))


def readable(records: Releases) -> Iterator[Release]:
    """A damaged record is passed over: it must not hide which file is lost."""
    for path in (path for recipe in records.recipes() for path in records.record_files(recipe)):
        with contextlib.suppress(SparkpinError, FileNotFoundError):
            yield read_record(path)


def made_from(paths: Paths, release: Release) -> frozenset[str]:
    """The SHA-256 of every file that the release's images were made from; none where the records are gone."""
    try:
        records = records_of(paths, release)
    except SparkpinError:
        return frozenset()
    debs = {deb.sha256 for record in records for spec in record.root_file_systems for deb in spec.debs}
    return frozenset(debs | {file.sha256 for record in records for file in record.context})


def bundle_of(evidence: Path) -> str:
    """How a bundle brings the files back, the newest that has the store first; empty when none is known."""
    for row in rows(evidence / EXPORTS):
        if row.get("with_store"):
            return f"`invoke import {row['file']}` (exported {day(row)} with its store) brings it back"
    for row in rows(evidence / IMPORTS):
        return f"`invoke import {row['file']}` (as on {day(row)}) brings it back if that bundle has its store"
    return ""


def export_of(release: Release) -> str:
    return (
        f"`invoke export {release.tag} FILE --with-store` on a machine that still has its store, and "
        "`invoke import FILE` here, bring it back"
    )


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """What was noted about bundles, the newest first. What is damaged is passed over: it is a note and no evidence."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    if isinstance(found, list):
        yield from (row for row in reversed(found) if isinstance(row, dict) and isinstance(row.get("file"), str))


def day(row: dict[str, Any]) -> str:
    return str(row.get("time", "some day"))[:10]
