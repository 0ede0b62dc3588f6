"""Read what a report says from records, evidence and the project as it was. No engine, and nothing is fetched."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version

from sparkpin.checkpoint.steps import checkpoint_steps, used_repositories
from sparkpin.core import terminal
from sparkpin.core.errors import ManifestError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import gib
from sparkpin.distribute import digests
from sparkpin.distribute.signing import Keys
from sparkpin.fetch.model_files import TEXTS, repository_folder
from sparkpin.fetch.store import Store, find_missing
from sparkpin.memory.plan import MemoryPlan
from sparkpin.memory.text import log_line
from sparkpin.pins import manifests
from sparkpin.releases.kept_inputs import project_of, reason
from sparkpin.releases.promotions import landing
from sparkpin.releases.protection import protections_of
from sparkpin.releases.quality_gate import is_refused
from sparkpin.releases.record import Release, Releases, now
from sparkpin.report import facts
from sparkpin.report.measured import duration, quality_of, smoke_of, speed_of
from sparkpin.serve.memory_limit import plan_of
from sparkpin.upgrade.bump_record import Bump, bumps_of

QUALITY: dict[facts.Kind, str] = {"good": "within limits", "bad": "too much lost", "unclear": "unclear"}


def gather(paths: Paths, recipe: str | None) -> facts.Report:
    """Of one recipe, or of every recipe that has a release. InputError for a recipe that nobody knows."""
    records = Releases(paths)
    parts, faults = [], []
    for name in [recipe] if recipe else records.recipes():
        known, broken = records.readable(name)
        if known:
            parts.append(recipe_part(paths, records, name, known, broken))
        else:
            faults += [fault.message for fault in broken]
            if recipe and not broken:
                manifests.load_recipe(paths.project, name)
    sparkpin_version = ""
    with contextlib.suppress(PackageNotFoundError):  # run from a checkout that nobody installed
        sparkpin_version = version("sparkpin")
    return facts.Report(now(), sparkpin_version, tuple(parts), tuple(faults))


def recipe_part(
    paths: Paths, records: Releases, name: str, releases: Sequence[Release], broken: Sequence[ManifestError]
) -> facts.RecipePart:
    """releases: at least one, from the oldest to the newest."""
    current = next((release for release in releases if release.state == "current"), None)
    shown = current or releases[-1]
    back = landing(releases, current, records.before(name), partial(is_refused, paths)) if current else None
    speeds = {release.tag: speed_of(paths, release) for release in releases}
    faults = [fault.message for fault in broken]
    words, protections, bumps = "", protections_of(records, name), tuple[Bump, ...]()
    with contextlib.suppress(SparkpinError), project_of(paths, shown) as project:  # as it was; its files may be gone
        words = manifests.load_recipe(project, name).description
    try:
        bumps = bumps_of(paths, name)
    except ManifestError as fault:
        faults.append(fault.message)
    items = {}
    for former, release in zip([None, *releases], releases, strict=False):
        protection = protections.get(release.tag)
        verdicts = [bump.text for bump in bumps if bump.release == release.tag]
        items[release.tag] = facts.Item(
            release=release,
            smoke=smoke_of(release),
            quality=quality_of(paths, release),
            speed=speeds[release.tag].evidence,
            notes=tuple(
                filter(None, (protection.text if protection else "", *verdicts[-1:], confirmed_of(paths, release)))
            ),
            command=f"invoke diff {former.tag} {release.tag}" if former else "",
        )
    memory, drawn = memory_of(paths, shown), speeds_to_draw(releases, speeds)
    return facts.RecipePart(
        name=name,
        description=words,
        shown=items[shown.tag],
        current=current is not None,
        promoted=records.promotions(name)[-1].time if current else "",
        back=tuple(ways_back(paths, name, current, back)),
        machine=speeds[shown.tag].machine or (shown.host.line if shown.host else ""),
        tiles=tuple(tiles_of(items[shown.tag], speeds[shown.tag], memory)),
        bars=tuple(bars_of(releases, drawn)),
        measured_by=next(map(by, drawn.values()), ""),
        memory=memory,
        items=tuple(reversed(items.values())),
        bumps=tuple(reversed(bumps)),
        faults=tuple(faults),
    )


def confirmed_of(paths: Paths, release: Release) -> str:
    """Who else got this image, of those that this machine trusts."""
    found = digests.confirmations(paths.project, release.build_key, release.image, Keys.from_env().allowed)
    return found.line if found.builders else ""


def tiles_of(item: facts.Item, speed: facts.Speed, memory: facts.ReportMemory) -> Iterator[facts.ReportRow]:
    """What is known at a glance. What was not measured has no tile: its chart says how to measure it."""
    smoke, quality = item.smoke, item.quality
    verdict, _, rest = smoke.text.partition(" in ")
    yield facts.ReportRow(
        "Smoke test", verdict.partition(":")[0], smoke.kind, rest or verdict.partition(": ")[2] or smoke.hint
    )
    if speed.rate:
        note = f"one request at a time, {by(speed)}"
        yield facts.ReportRow("Output", f"{terminal.figure(speed.rate)} tok/s", note=note)
    if speed.first:
        yield facts.ReportRow("First token", duration(speed.first), note=f"the median, {by(speed)}")
    if quality.kind != "none":
        yield facts.ReportRow("Quality", QUALITY[quality.kind], quality.kind, quality.text)
    if memory.total:
        note = f"needed of {gib(memory.total)}; {gib(memory.free)} are free"
        yield facts.ReportRow("Memory", gib(memory.needed), memory.kind, note)
    if memory.users:
        count, _, length = memory.users.partition(", ")
        yield facts.ReportRow("Requests at once", count, note=length)


def by(speed: facts.Speed) -> str:
    return "by the smoke test's own requests" if speed.of_smoke else "by invoke bench"


def speeds_to_draw(releases: Sequence[Release], speeds: Mapping[str, facts.Speed]) -> dict[str, facts.Speed]:
    """By tag, the newest of each stage that was measured on the machine of the newest: several machines do not compare,
    nor do smoke tests with benchmarks."""
    measured = [release for release in releases if speeds[release.tag].rate]
    measured = [one for one in measured if not speeds[one.tag].of_smoke] or measured
    machine = speeds[measured[-1].tag].machine if measured else ""
    newest = {one.stage: one for one in measured if speeds[one.tag].machine == machine}
    return {one.tag: speeds[one.tag] for one in newest.values()}


def bars_of(releases: Sequence[Release], drawn: Mapping[str, facts.Speed]) -> Iterator[facts.SpeedBar]:
    for release in releases:
        if speed := drawn.get(release.tag):
            kind: facts.Kind = "bad" if release.smoke_failed else "unclear" if speed.of_smoke else "good"
            yield facts.SpeedBar(release.stage, speed.rate or 0.0, kind, speed.ceiling)


def ways_back(paths: Paths, recipe: str, current: Release | None, back: Release | None) -> list[facts.ReportCommand]:
    """What to type to go back. None where there is nothing to go back to."""
    if current is None or back is None:
        return []
    forward = f"forward again, to what is current now; then invoke serve --recipe {recipe}"
    return [
        facts.ReportCommand(f"invoke rollback --recipe {recipe} --serve", f"{back.tag} comes back, and is served"),
        facts.ReportCommand(f"invoke promote {current.tag}", forward),
    ]


def memory_of(paths: Paths, release: Release) -> facts.ReportMemory:
    """The plan, where the headers of its model are here: a report fetches nothing."""
    try:
        if absent := absent_files(paths, release):
            hint = f"invoke plan --recipe {release.recipe} fetches what it needs"
            text = f"no plan: {terminal.count(absent, 'file')} of its model not here"
            return facts.ReportMemory(text, "none", lines=(hint,))
        return memory_row(plan_of(paths, release))
    except SparkpinError as error:
        return facts.ReportMemory("no plan", "none", lines=(reason(error),))


def absent_files(paths: Paths, release: Release) -> int:
    """Headers, configurations and indexes that a plan would fetch."""
    with project_of(paths, release) as project:
        model = manifests.load_models(project, release.model, release.drafter)
        lock = manifests.load_model_lock(project, model)
        steps = checkpoint_steps(manifests.load_chain(project, release.stage), model)
    absent = 0
    for entry in (lock.repositories[name] for name in used_repositories(model, steps)):
        folder, store = repository_folder(paths, entry), Store(paths.store)
        rows = [(file, folder / file.file) for file in entry.files if file.file in TEXTS]
        rows += [(header, store.path(header.sha256)) for header in entry.headers]
        absent += len(find_missing(rows, remove=False))
    return absent


def memory_row(plan: MemoryPlan) -> facts.ReportMemory:
    machine = plan.machine
    fits = "fits" if plan.fits else "does not fit"
    users = [f"{count:,}, {length:,} tokens each" for length, count in plan.chosen.requests.items()]
    return facts.ReportMemory(
        f"{fits}: needs {gib(plan.needed)} of {gib(machine.free)} free on {machine.source}",
        "good" if plan.fits else "bad",
        tuple((line.what, line.bytes, line.how) for line in plan.lines),
        (log_line(plan), *plan.problems),
        needed=plan.needed,
        free=machine.free,
        total=machine.total,
        source=machine.source,
        users=users[-1] if users else "",
    )
