"""What a bump tried and found: SPARKPIN_HOME/bumps/<id>/bump.json, and the search for a culprit beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from sparkpin.core.files import write_json
from sparkpin.core.models import StrictModel
from sparkpin.core.paths import Paths
from sparkpin.releases.record import PRIVATE, read_optional

FOLDER, FILE, LOCK = "bumps", "bump.json", ".lock"


class Step(StrictModel):
    name: str
    passed: bool
    detail: str  # what was seen, in a line
    seconds: float


class Bump(StrictModel):
    schema_: Annotated[Literal[1], Field(alias="schema")] = 1
    recipe: str
    what: str  # of `invoke bump --what`
    time: str  # of its beginning, ISO 8601
    current: str  # tag of the release that was current then
    release: str = ""  # tag of the one that was tried; "" where the lock came to none
    changes: tuple[str, ...] = Field(default=(), strict=False)  # one a package, repository of a model or variable
    steps: tuple[Step, ...] = Field(default=(), strict=False)
    verdict: Literal["", "promote", "stay"] = ""  # "" while it is under way, or was killed
    reason: str = ""  # why it stays: the first step that failed
    guilty: str = ""  # the changes that make it fail, as far as the search could find
    applied: str = ""  # when it was promoted

    @property
    def text(self) -> str:
        """The verdict in a line."""
        if self.verdict != "stay":
            return "promoted" if self.applied else self.verdict or "not finished"
        return f"stay: {self.reason}" + (f"; because of {self.guilty}" if self.guilty else "")


BUMP = TypeAdapter(Bump)


def read(folder: Path) -> Bump | None:
    """ManifestError for what is no such record."""
    return read_optional(folder / FILE, BUMP, next_step=f"rm -r {folder}: the same versions are tried again")


def write(folder: Path, bump: Bump) -> None:
    write_json(folder / FILE, bump.model_dump(mode="json", by_alias=True), PRIVATE)


def bumps_of(paths: Paths, recipe: str) -> tuple[Bump, ...]:
    """From the oldest to the newest. ManifestError for one that is damaged."""
    found = [read(path.parent) for path in (paths.home / FOLDER).glob(f"[!.]*/{FILE}")]
    return tuple(sorted((one for one in found if one and one.recipe == recipe), key=lambda one: one.time))
