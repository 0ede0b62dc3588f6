"""What a search has found so far, so that a killed one goes on: SPARKPIN_HOME/bisect/<id>/state.json, and the logs of
each trial beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from sparkpin.core.errors import ManifestError
from sparkpin.core.files import write_json
from sparkpin.history.bisect.search import Verdict
from sparkpin.pins.schema import StrictModel
from sparkpin.releases.record import check_schema, read_json

FOLDER = "bisect"  # of SPARKPIN_HOME
FILE = "state.json"
LOCK = ".lock"
ANEW = "rm {0}: the search begins anew"


class Trial(StrictModel):
    """chosen: ids of the changes; how: what was seen, in a few words; seconds: that it took; log: file beside."""

    chosen: list[str]
    verdict: Verdict
    how: str
    seconds: float
    log: str = ""


class State(StrictModel):
    """good, bad: tags; changes: their texts, for people; trials: in their order."""

    schema_: Annotated[Literal[1], Field(alias="schema")] = 1
    good: str
    bad: str
    check: str
    changes: list[str]
    trials: list[Trial]


def read(path: Path) -> State | None:
    """ManifestError for what is no state."""
    try:
        value = read_json(path)
    except FileNotFoundError:
        return None
    except ManifestError as error:  # what it advises is for records of releases
        error.next_step = ANEW.format(path)
        raise
    check_schema(path, value)
    try:
        return State.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ManifestError(path, key, first["input"], first["msg"], next_step=ANEW.format(path)) from None


def write(path: Path, state: State) -> None:
    write_json(path, state.model_dump(mode="json", by_alias=True))
