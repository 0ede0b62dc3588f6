"""Which charts a recipe gets: what was measured of its releases, over time and by stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from sparkpin.history.report.facts import Chart, Kind, Point, Series
from sparkpin.history.report.speed import Speed
from sparkpin.releases.record import Release

Value = Callable[[Release], float | None]
FEWEST = 2  # points that make a history


def charts_of(
    releases: Sequence[Release], shown: Release, back: Release | None, speeds: Mapping[str, Speed]
) -> Iterator[Chart]:
    """releases: from the oldest to the newest; shown: whose stage the histories follow; back: what comes back."""
    measures: list[tuple[str, str, Literal["more", "less"], Value]] = [
        ("Output, one user", "tok/s", "more", lambda release: speeds[release.tag].tokens),
        ("First token after", "s", "less", lambda release: speeds[release.tag].first),
        ("Prompts read", "tok/s", "more", lambda release: speeds[release.tag].prefill),
        ("Start to first answer", "s", "less", lambda release: number(release, "ready_seconds")),
        ("Drafted tokens accepted", "%", "more", accepted),
    ]
    history = [release for release in releases if release.stage == shown.stage]
    newest = list({release.stage: release for release in releases}.values())
    for title, unit, better, value in measures:
        points = tuple(points_of(history, value, lambda release: release.key[:4]))
        if len(points) >= FEWEST:
            yield Chart(f"{title}: {shown.stage}", unit, "line", (Series(shown.stage, points),), better)
        points = tuple(points_of(newest, value, lambda release: release.stage))
        if len(points) >= FEWEST:
            yield Chart(f"{title}: newest of each stage", unit, "bars", (Series(title, points),), better)
    sweeps = [
        Series(release.name, tuple(Point(str(users), tokens) for users, tokens in speeds[release.tag].sweep))
        for release in (shown, back)
        if release and speeds[release.tag].sweep
    ]
    if sweeps:
        yield Chart("Output of all users at once", "tok/s", "sweep", tuple(sweeps))


def points_of(releases: Sequence[Release], value: Value, label: Callable[[Release], str]) -> Iterator[Point]:
    for release in releases:
        if (found := value(release)) is not None:
            kind: Kind = "bad" if release.smoke_failed else "good"
            yield Point(label(release), found, kind)


def number(release: Release, key: str) -> float | None:
    """Of a smoke test's result; None where it has none that can be drawn: a record may come from anybody."""
    found = (release.smoke or {}).get(key)
    if not isinstance(found, int | float) or isinstance(found, bool) or not math.isfinite(found):
        return None
    return float(found)


def accepted(release: Release) -> float | None:
    share = number(release, "acceptance")
    return None if share is None else 100 * share
