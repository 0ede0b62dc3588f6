"""Read what a report says from records, evidence and the project as it was. No engine, and nothing is fetched."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version

from sparkpin.core.errors import ManifestError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.history.report.changes import Sides, changes_of, read_sides
from sparkpin.history.report.charts import charts_of
from sparkpin.history.report.facts import Item, RecipePart, Report, ReportCommand
from sparkpin.history.report.inputs import inputs_of
from sparkpin.history.report.measured import quality_of, smoke_of
from sparkpin.history.report.memory import memory_of
from sparkpin.history.report.speed import Speed, speed_of
from sparkpin.host.machine import serve_command
from sparkpin.pins import manifests
from sparkpin.releases.current import rollback_target
from sparkpin.releases.keep import pins_of
from sparkpin.releases.kept_inputs import project_of
from sparkpin.releases.quality_gate import is_refused
from sparkpin.releases.record import Release, Releases, now, read_json


def gather(paths: Paths, recipe: str | None) -> Report:
    """Of one recipe, or of every recipe that has a release. InputError for a recipe that nobody knows."""
    records = Releases(paths)
    names = [recipe] if recipe else records.recipes()
    parts, faults = [], []
    for name in names:
        known, broken = records.readable(name)
        if known:
            parts.append(recipe_part(paths, records, name, known, broken))
        else:
            faults += [fault.message for fault in broken]
            if recipe and not broken:
                manifests.load_recipe(paths.project, name)
    return Report(now(), own_version(), tuple(parts), tuple(faults))


def own_version() -> str:
    try:
        return version("sparkpin")
    except PackageNotFoundError:  # run from a checkout that nobody installed
        return ""


def recipe_part(
    paths: Paths, records: Releases, name: str, releases: Sequence[Release], faults: Sequence[ManifestError]
) -> RecipePart:
    """releases: at least one, from the oldest to the newest."""
    current = next((release for release in releases if release.state == "current"), None)
    shown = current or releases[-1]
    back = rollback_target(list(releases), current, partial(is_refused, paths)) if current else None
    speeds = {release.tag: speed_of(paths, release) for release in releases}
    sides = read_sides(paths, releases)
    told = [fault.message for fault in faults]
    try:
        pins = {tag: pin.text for tag, pin in pins_of(records, name).items()}
    except ManifestError as fault:
        pins = {}
        told.append(fault.message)
    items = {
        release.tag: item(paths, releases, release, speeds[release.tag], sides, pins.get(release.tag, ""))
        for release in releases
    }
    return RecipePart(
        name=name,
        description=description(paths, shown),
        shown=items[shown.tag],
        current=current is not None,
        promoted=promoted(records, name) if current else "",
        back=tuple(ways_back(paths, name, current, back)),
        charts=tuple(charts_of(releases, shown, back, speeds)),
        memory=memory_of(paths, shown),
        inputs=inputs_of(paths, shown),
        items=tuple(reversed(items.values())),
        faults=tuple(told),
    )


def item(paths: Paths, releases: Sequence[Release], release: Release, speed: Speed, sides: Sides, pinned: str) -> Item:
    return Item(
        tag=release.tag,
        name=release.name,
        stage=release.stage,
        state=release.state,
        created=release.created,
        image=release.image,
        size=release.size,
        build_seconds=release.build_seconds,
        smoke=smoke_of(release),
        quality=quality_of(paths, release),
        speed=speed.evidence,
        changes=changes_of(paths, releases, sides, release),
        command=way_to(paths, release),
        pinned=pinned,
        host=release.host.line if release.host else "",
    )


def way_to(paths: Paths, release: Release) -> ReportCommand | None:
    if release.state == "current":
        return None
    if release.is_good and is_refused(paths, release):
        return ReportCommand(f"invoke promote {release.tag}", "says why it is refused, and what to do")
    if release.is_good:
        return ReportCommand(
            f"invoke promote {release.tag}",
            f"makes it the current one; then {serve_command(paths.project, release.recipe)}",
        )
    return ReportCommand(f"invoke smoke {release.tag}", "only what passed its smoke test can be promoted")


def ways_back(paths: Paths, recipe: str, current: Release | None, back: Release | None) -> list[ReportCommand]:
    """What to type to go back, in its order. None where there is nothing to go back to."""
    if current is None or back is None:
        return []
    return [
        ReportCommand(f"invoke rollback --recipe {recipe} --serve", f"{back.tag} comes back, and is served"),
        ReportCommand(
            f"invoke promote {current.tag}",
            f"forward again, to what is current now; then {serve_command(paths.project, recipe)}",
        ),
        ReportCommand(f"invoke rebuild {back.tag}", "before that, where its image or checkpoint is gone"),
    ]


def promoted(records: Releases, recipe: str) -> str:
    return str(read_json(records.pointer_path(recipe)).get("promoted", ""))


def description(paths: Paths, release: Release) -> str:
    """The recipe's own words when the release was made; "" where its files are not kept."""
    try:
        with project_of(paths, release) as project:
            return manifests.load_recipe(project, release.recipe).description
    except SparkpinError:
        return ""
