"""The folder that a smoke test, or what runs in its place, leaves with a release, and what is still to be found out."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sparkpin.core.files import PARTIAL, atomic_folder
from sparkpin.core.paths import Paths
from sparkpin.host.engine import Engine
from sparkpin.host.fingerprint import Fingerprint
from sparkpin.releases.record import Release, Releases
from sparkpin.releases.runs_here import obstacle

FAILED = "smoke-failed"  # what the last test left that failed and was repeated, to report it
Write = Callable[[Path], None]
"""Fills an empty folder with what a smoke test leaves."""


def evidence_folder(paths: Paths, release: Release) -> Path:
    return Releases(paths).evidence(release) / "smoke"


def record_of(result: Any, release: Release, host: Fingerprint) -> dict[str, Any]:
    """What result.json has of any test. result: a dataclass; host: where it ran."""
    return dataclasses.asdict(result) | {
        "schema": 1,
        "release": release.tag,
        "image": release.image,
        "host": host.model_dump(mode="json"),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def kept(paths: Paths, release: Release, result: Any, write: Write) -> Release:
    """The release with the result in its record and the evidence in its folder. Where the record keeps what another
    run found meanwhile, that run's evidence stays, too. That of a test that failed stays beside it, as FAILED.
    """

    def place() -> None:
        for left in evidence_folder(paths, release).parent.glob(PARTIAL + "*/"):  # folders are a killed smoke test's
            shutil.rmtree(left, ignore_errors=True)
        folder = evidence_folder(paths, release)
        failed = folder.with_name(FAILED) if Releases(paths).get(release.tag).smoke_failed else None
        with replaced(folder, failed) as partial:
            write(partial)

    return Releases(paths).smoked(release.tag, result, place)


@contextlib.contextmanager
def replaced(folder: Path, aside: Path | None = None) -> Iterator[Path]:
    """A folder to fill, which then takes the place of the former one, whole. aside: where that one stays."""
    former = None
    with atomic_folder(folder) as partial:
        yield partial
        if folder.exists():
            former = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=folder.parent))
            if aside and aside.exists():
                aside.rename(former / aside.name)
            folder.rename(aside or former / folder.name)
    if former:
        shutil.rmtree(former)


def is_compared(release: Release) -> bool:
    """Whether its numbers were compared with those of the stage below, where they are to be (`smoke.drift`)."""
    checks = (release.smoke or {}).get("checks", ())
    return all(check.get("applicable", True) for check in checks if check["name"] == "drift")


def owes(paths: Paths, engine: Engine, release: Release) -> bool:
    """Whether a smoke test here could tell more of a release that has not failed than its record does."""
    return release.smoke is None or (release.smoke_inspected and not obstacle(paths, engine, release))
