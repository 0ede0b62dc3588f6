"""What a search has found so far, so that a killed one goes on: SPARKPIN_HOME/bisect/<id>/state.json, and the logs of
its trials beside it. Nobody else reads them: a check may print what is secret."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field, TypeAdapter

from sparkpin.core.errors import ManifestError
from sparkpin.core.files import write_json
from sparkpin.core.models import StrictModel
from sparkpin.releases.record import PRIVATE, read_as
from sparkpin.upgrade.bisect.search import Verdict

T = TypeVar("T")
FOLDER = "bisect"  # of SPARKPIN_HOME
FILE = "state.json"
LOCK = ".lock"


class Trial(StrictModel):
    chosen: tuple[str, ...] = Field(default=(), strict=False)  # ids of the changes
    verdict: Verdict
    how: str  # what was seen, in a few words
    started: bool = True  # False where its server did not become ready
    seconds: float = 0.0  # that it took
    log: str = ""  # file in the same folder


class State(StrictModel):
    schema_: Annotated[Literal[1], Field(alias="schema")] = 1
    good: str  # a tag, as bad
    bad: str
    check: str
    changes: list[str]  # their texts, for people
    trials: list[Trial]  # in their order


def read(path: Path) -> State | None:
    """ManifestError for what is no state."""
    return read_saved(path, State, f"rm {path}: the search begins again")


def read_saved(path: Path, kind: type[T], step: str) -> T | None:
    """ManifestError for a file of another shape; step: what to do about it."""
    try:
        return read_as(path, TypeAdapter(kind), next_step=step)
    except FileNotFoundError:
        return None
    except ManifestError as error:
        error.next_step = step
        raise


def write(path: Path, state: State) -> None:
    write_json(path, state.model_dump(mode="json", by_alias=True), PRIVATE)
