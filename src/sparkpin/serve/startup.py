"""The file that keeps what the last start of a release took."""

from __future__ import annotations

import contextlib
from pathlib import Path

from pydantic import BaseModel

from sparkpin.core import files
from sparkpin.releases.record import Release
from sparkpin.smoke.startup import Startup, load_format, weights_seconds

FILE = "start.json"


class LastStart(BaseModel):
    """What the last start of a release took on this machine. seconds: until it answered; began: see Startup."""

    seconds: float
    began: dict[str, float]


def keep(folder: Path, release: Release, startup: Startup, seconds: float, log: bytes) -> None:
    """log: of this start alone. What it says that reading the weights took is kept, None where it says nothing."""
    value = {
        "schema": 1,
        "release": release.tag,
        "seconds": round(seconds, 1),
        "began": startup.began,
        "load_format": load_format(release.argv),
        "weights_seconds": weights_seconds(log),
    }
    files.write_json(folder / FILE, value)


def last(folder: Path) -> LastStart | None:
    """Of the release whose folder it is, else the newest of its recipe. None where there is none, or none that can be
    read: it is a hint and nothing more."""
    with contextlib.suppress(OSError, ValueError):
        others = sorted(folder.parent.glob(f"*/{FILE}"), key=lambda path: path.stat().st_mtime)
        path = next((path for path in (folder / FILE, *reversed(others)) if path.is_file()), folder / FILE)
        return LastStart.model_validate_json(path.read_bytes())
    return None
