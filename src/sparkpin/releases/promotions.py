"""Which release of a recipe is current, and which were before: what an append-only list of promotions comes to. Pure.

releases/<recipe>/promotions.json: {"schema": 1, "promotions": [{"tag": TAG, "time": ..., "rollback": false}, ...]}

The last row names the current release. A command appends one row, and does so last: killed before that, it has changed
nothing, and the same command again does it all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from sparkpin.core.models import StrictModel
from sparkpin.core.tags import TAG

if TYPE_CHECKING:
    from sparkpin.releases.record import Release

FILE = "promotions.json"


class Promotion(StrictModel):
    """time: ISO 8601, UTC; rollback: it undoes the promotions since the tag was current last; accepted: limits of its
    stage that it was beyond, as measured until then -> why that was taken."""

    tag: Annotated[str, Field(pattern=TAG.pattern)]
    time: str
    rollback: bool = False
    accepted: dict[str, str] = Field(default_factory=dict)


class Promotions(StrictModel):
    """The file. promotions: the first one first."""

    schema_: Annotated[Literal[1], Field(alias="schema")] = 1
    promotions: Annotated[tuple[Promotion, ...], Field(strict=False, min_length=1)]


def current_of(promotions: Sequence[Promotion]) -> str | None:
    return promotions[-1].tag if promotions else None


def former_of(promotions: Sequence[Promotion]) -> list[str]:
    """Tags that were current before the current one, the last promoted at the end: the order, reversed, in which
    `rollback` goes back. Each promotion counts, and what was rolled back is undone."""
    before: list[str] = []
    current = None
    for row in promotions:
        if row.rollback:
            while before and before.pop() != row.tag:
                pass
        elif current not in (None, row.tag):
            before.append(str(current))
        current = row.tag
    return before


def ways_back(known: Sequence[Release], current: Release, before: Sequence[str]) -> list[str]:
    """Tags in the order in which a rollback tries them: what was current, the last first; then what is older than the
    current release, passed and never was current: of its stage, then of any.

    One build makes a release of every stage of a chain, moments apart; the stage below in the same build is not what a
    person wants back. known: from the oldest to the newest.
    """
    never = [one for one in reversed(known) if one.age < current.age and one.state == "passed"]
    never.sort(key=lambda release: release.stage != current.stage)
    tags = dict.fromkeys([*reversed(before), *(release.tag for release in never)])
    return [tag for tag in tags if tag != current.tag]


def landing(
    known: Sequence[Release], current: Release, before: Sequence[str], refused: Callable[[Release], bool]
) -> Release | None:
    """Where a rollback would land, without asking an engine. refused: asked as far as it has to be."""
    named = {release.tag: release for release in known}
    ways = (named[tag] for tag in ways_back(known, current, before) if tag in named)
    return next((release for release in ways if release.is_good and not refused(release)), None)
