"""The memory plan of a release, where the headers of its model are at hand: a report fetches nothing."""

from __future__ import annotations

from sparkpin.checkpoint.plan import checkpoint_steps, used_repositories
from sparkpin.core import terminal
from sparkpin.core.errors import SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.fetch import model as hub
from sparkpin.fetch.model_files import TEXTS, repository_folder
from sparkpin.fetch.store import Store
from sparkpin.history.report.facts import ReportMemory
from sparkpin.pins import manifests
from sparkpin.releases.kept_inputs import project_of, reason
from sparkpin.releases.record import Release
from sparkpin.serve.memory.plan import SEE_BELOW, MemoryPlan, gib
from sparkpin.serve.memory.text import log_line
from sparkpin.serve.memory_limit import plan_of


def memory_of(paths: Paths, release: Release) -> ReportMemory:
    try:
        if absent := absent_files(paths, release):
            hint = f"invoke plan --recipe {release.recipe} fetches what it needs"
            return ReportMemory(
                f"no plan: {terminal.count(absent, 'file')} of its model not here", "none", lines=(hint,)
            )
        return told(plan_of(paths, release))
    except SparkpinError as error:
        return ReportMemory("no plan", "none", lines=(reason(error),))


def absent_files(paths: Paths, release: Release) -> int:
    """Headers, configurations and indexes that a plan would fetch."""
    with project_of(paths, release) as project:
        model = manifests.load_model(project, release.model)
        lock = manifests.load_model_lock(project, model)
        steps = checkpoint_steps(manifests.load_chain(project, release.stage))
    absent = 0
    for entry in (lock.repositories[name] for name in used_repositories(model, steps)):
        texts = [file for file in entry.files if file.file in TEXTS]
        absent += len(hub.missing_files(repository_folder(paths, entry), texts, terminal.say))
        absent += len(hub.lacking(Store(paths.store), entry.headers, terminal.say))
    return absent


def told(plan: MemoryPlan) -> ReportMemory:
    machine = plan.machine
    headline = f"needs {gib(plan.needed)} of {gib(machine.free)} free on {machine.source}"
    users = ", ".join(f"{count} at {length:,} tokens" for length, count in plan.chosen.users.items())
    return ReportMemory(
        f"{'fits: ' if plan.fits else 'does not fit: '}{headline}",
        "good" if plan.fits else "bad",
        tuple((line.what, line.bytes, line.how, "" if line.note == SEE_BELOW else line.note) for line in plan.lines),
        (log_line(plan), *([f"users: {users}"] if users else []), *plan.problems, *plan.hints, *plan.notes),
    )
