"""The memory plan of a release, where the headers of its model are at hand: a report fetches nothing."""

from __future__ import annotations

from sparkpin import hub, manifests, ui
from sparkpin.checkpoint.plan import checkpoint_steps, used_repositories
from sparkpin.errors import SparkpinError
from sparkpin.inputs import project_of, reason
from sparkpin.memory.plan import SEE_BELOW, MemoryPlan, gib
from sparkpin.memory.words import log_line
from sparkpin.modelfiles import TEXTS, repository_folder
from sparkpin.paths import Paths
from sparkpin.releases import Release
from sparkpin.report.facts import Memory
from sparkpin.serving.room import plan_of
from sparkpin.store import Store


def memory_of(paths: Paths, release: Release) -> Memory:
    try:
        if absent := absent_files(paths, release):
            hint = f"invoke plan --recipe {release.recipe} fetches what it needs"
            return Memory(f"no plan: {ui.count(absent, 'file')} of its model not here", "none", lines=(hint,))
        return told(plan_of(paths, release))
    except SparkpinError as error:
        return Memory("no plan", "none", lines=(reason(error),))


def absent_files(paths: Paths, release: Release) -> int:
    """Headers, configurations and indexes that a plan would fetch."""
    with project_of(paths, release) as project:
        model = manifests.load_model(project, release.model)
        lock = manifests.load_model_lock(project, model)
        steps = checkpoint_steps(manifests.load_chain(project, release.stage))
    absent = 0
    for entry in (lock.repositories[name] for name in used_repositories(model, steps)):
        texts = [file for file in entry.files if file.file in TEXTS]
        absent += len(hub.missing_files(repository_folder(paths, entry), texts, ui.say))
        absent += len(hub.lacking(Store(paths.store), entry.headers, ui.say))
    return absent


def told(plan: MemoryPlan) -> Memory:
    machine = plan.machine
    headline = f"needs {gib(plan.needed)} of {gib(machine.free)} free on {machine.source}"
    users = ", ".join(f"{count} at {length:,} tokens" for length, count in plan.chosen.users.items())
    return Memory(
        f"{'fits: ' if plan.fits else 'does not fit: '}{headline}",
        "good" if plan.fits else "bad",
        tuple((line.what, line.bytes, line.how, "" if line.note == SEE_BELOW else line.note) for line in plan.lines),
        (log_line(plan), *([f"users: {users}"] if users else []), *plan.problems, *plan.hints, *plan.notes),
    )
