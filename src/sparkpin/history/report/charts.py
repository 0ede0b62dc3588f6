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
    """Of the newest of each stage that was measured, and of the release that is shown. releases: from the oldest to the
    newest; back: what comes back."""
    if points := tuple(stage_points(releases, speeds)):
        yield Chart("Output by stage", "tok/s", "bars", (Series("newest of each", points),), note=note_of(points))
    sweeps = [
        Series(release.name, tuple(Point(str(users), tokens) for users, tokens in speeds[release.tag].sweep))
        for release in (shown, back)
        if release and speeds[release.tag].sweep
    ]
    if sweeps:
        yield Chart("Output by users", "tok/s", "sweep", tuple(sweeps), note="of all users together")
    if lengths := speeds[shown.tag].lengths:
        points = tuple(Point(f"{length:,} tokens", 1000 * seconds) for length, seconds in lengths)
        note = f"of {shown.name}, one user, by length of the prompt"
        yield Chart("First token by prompt length", "ms", "bars", (Series(shown.name, points),), "less", note)


def stage_points(releases: Sequence[Release], speeds: Mapping[str, Speed]) -> Iterator[Point]:
    """The newest of each stage that was measured; several machines in one picture would tell of the machines."""
    measured = [release for release in releases if speeds[release.tag].tokens]
    machine = speeds[measured[-1].tag].machine if measured else ""
    for release in {one.stage: one for one in measured if speeds[one.tag].machine == machine}.values():
        speed = speeds[release.tag]
        assert speed.tokens
        yield Point(release.stage, speed.tokens, "bad" if release.smoke_failed else "good", speed.ceiling)


def note_of(points: Sequence[Point]) -> str:
    known = [point for point in points if point.ceiling]
    if not known:
        return "one user; no ceiling: invoke bench --bandwidth takes the memory's GB/s"
    return f"one user; of the ceiling{'' if len(known) == len(points) else ', where it is known'}"


def histories_of(releases: Sequence[Release], shown: Release, speeds: Mapping[str, Speed]) -> Iterator[Chart]:
    """releases: from the oldest to the newest; shown: whose stage the histories follow."""
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
        if len(points) >= FEWEST and title != measures[0][0]:
            yield Chart(f"{title}: newest of each stage", unit, "bars", (Series(title, points),), better)


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
