"""A bump from its beginning to its end: lock on the side, try, judge, search for what is to blame, promote.

The side is a copy of the project, in which newer versions are locked: the user's files are touched by `--apply` alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from sparkpin.build.consistent import require_consistent
from sparkpin.build.pair import Pairing, pair, require_model_fits
from sparkpin.core import files, terminal
from sparkpin.core.errors import BumpError, InputError, IntegrityError, ManifestError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import printable, say, show
from sparkpin.fetch.lock_model import lock_model
from sparkpin.fetch.stack import lock_stack
from sparkpin.fetch.wheels import Newer
from sparkpin.host.engine import engine_of
from sparkpin.pins import manifests
from sparkpin.pins.schema import UNRESOLVED, ModelPin, Recipe, Stack
from sparkpin.releases.container import require_image
from sparkpin.releases.kept_inputs import project_of
from sparkpin.releases.record import Release, now
from sparkpin.releases.runs_here import obstacle
from sparkpin.upgrade import bump_record as record
from sparkpin.upgrade.bisect_plan import changed_packages, make_plan
from sparkpin.upgrade.bisect_search import FOLDER, Search, Trial
from sparkpin.upgrade.bump_record import Bump, Step
from sparkpin.upgrade.bump_steps import FAILURES, Candidate, Commands

FOLDERS = ("pins", "stages", "recipes", "dockerfiles", "mods")
What = Literal["all", "vllm", "python", "debian", "model"]
STEPS = ("build", "inspect", "smoke", "quality", "speed")


@dataclass(frozen=True)
class Asked:
    """what, hold: see `lock_newer`; apply: promote it and write the locks."""

    what: What
    hold: int
    apply: bool


def bump(paths: Paths, current: Release, asked: Asked, commands: Commands) -> None:
    """Try what is newer than the current release. BumpError where that one stays though there is something newer."""
    root = paths.home / record.FOLDER
    recipe = manifests.load_recipe(paths.project, current.recipe)
    stack, model = manifests.load_stack(paths.project, recipe.stack), manifests.model_of(paths.project, recipe)
    with files.lock(root / record.LOCK, wait=False), side_project(paths) as there:
        fresh, began = Bump(recipe=recipe.name, what=asked.what, time=now(), current=current.tag), time.monotonic()
        try:
            lock_newer(there, stack, moving_of(recipe, model), asked.what, asked.hold)
            pairings = pair(there.project, recipe.name, stage=current.stage)
            require_model_fits(paths, pairings[-1])
        except (IntegrityError, ManifestError) as error:
            folder = root / manifests.digest_of([current.key, error.message])[:12]
            record.write(folder, stays(fresh, (finished("lock", began, error.message, passed=False),)))
            raise BumpError(f"{current.tag} stays: lock: {error.message}", next_step=error.next_step) from None
        new, watched = pairings[-1], [*pairings[-1].inputs]
        locks = [name for name in watched if name.endswith(".lock")]  # what a bump may write
        before = contents(paths.project, watched)
        with project_of(paths, current) as project:
            changes = differences(pair(project, recipe.name, stage=current.stage)[-1], new)
        if not changes:
            show(f"nothing newer that the pins of {recipe.name} allow: {current.tag} stays")
            if asked.apply and new.tag == current.tag:  # a run may have been killed between promotion and lock
                write_locks(paths, there, locks)
            return
        show("\n  ".join([f"newer for {current.tag}:", *map(printable, changes)]))
        folder = root / manifests.digest_of([current.key, new.key])[:12]
        fresh = fresh.model_copy(update={"changes": tuple(changes), "release": new.tag})
        candidate = Candidate(there, engine_of(paths), current, pairings, commands)
        known = record.read(folder)
        bump = known if known and known.verdict else judge(candidate, fresh, folder)
        require_promotable(bump, folder)
        if not asked.apply:
            show("nothing was changed; next: the same command with --apply, which promotes it and writes the lock")
            return
        if contents(paths.project, watched) != before:
            changed = "pins or locks were changed while newer versions were tried"
            raise InputError(changed, next_step="nothing was promoted or written; the same command again")
        commands.promote(new.tag)
        record.write(folder, bump.model_copy(update={"applied": now()}))
        write_locks(paths, there, locks)


def judge(candidate: Candidate, fresh: Bump, folder: Path) -> Bump:
    """The verdict, which is kept in the folder. A run that was killed before it repeats its steps: the image is there,
    and what was smoked or measured is known."""
    current, steps = candidate.current, list[Step]()
    require_consistent(candidate.paths, current)
    if why := obstacle(candidate.paths, candidate.engine, current):
        step = "run bump on a machine that can serve it"
        raise InputError(f"{current.tag} and what is newer cannot run here: {why}", next_step=step)
    for name in STEPS:
        say(f"step {1 + len(steps)} of {len(STEPS)}: {name}")
        began = time.monotonic()
        try:
            steps.append(finished(name, began, candidate.run(name)))
        except FAILURES as error:
            require_consistent(candidate.paths, current)  # raises where that is what is wrong
            require_image(candidate.engine, current)
            steps.append(finished(name, began, error.message.splitlines()[0], passed=False))
            guilty = "" if name == "build" else blame(candidate, steps[-1], folder / FOLDER)
            bump = stays(fresh, tuple(steps), guilty)
            break
    else:
        bump = fresh.model_copy(update={"steps": tuple(steps), "verdict": "promote"})
    record.write(folder, bump)
    return bump


def finished(name: str, began: float, detail: str, *, passed: bool = True) -> Step:
    return Step(name=name, passed=passed, detail=detail, seconds=round(time.monotonic() - began, 1))


def stays(fresh: Bump, steps: tuple[Step, ...], guilty: str = "") -> Bump:
    reason = f"{steps[-1].name}: {steps[-1].detail}"
    return fresh.model_copy(update={"steps": steps, "verdict": "stay", "reason": reason, "guilty": guilty})


def blame(candidate: Candidate, step: Step, folder: Path) -> str:
    """The changes that make a step fail, or why they cannot be found."""
    try:
        plan = make_plan(candidate.paths, candidate.current.tag, candidate.release.tag)
    except (InputError, IntegrityError) as error:
        return f"what cannot be searched: {error.message}"
    say(f"{step.name} failed; which of {terminal.count(len(plan.changes), 'change')} is to blame?")
    known = {frozenset(plan.changes): Trial(verdict="bad", how=step.detail)}
    if step.name in ("quality", "speed"):  # they are against the good one itself
        known[frozenset[str]()] = Trial(verdict="good", how="")
    search = Search(plan, candidate.judge(step.name), folder, known)
    if search.trial(()).verdict != "good":
        return "something else: the current release does the same now"
    return ", ".join(plan.changes[change] for change in search.culprits())


def require_promotable(bump: Bump, folder: Path) -> None:
    """Prints the verdict. BumpError where the current release stays."""
    for one in bump.steps:
        verdict = "ok" if one.passed else "failed"
        show(f"{one.name:8} {verdict:7} {terminal.seconds(one.seconds):>9}  {printable(one.detail)}")
    if bump.guilty:
        show(f"because of {printable(bump.guilty)}")
    show(f"verdict: {bump.verdict} ({folder / record.FILE})")
    if bump.verdict == "stay":
        step = f"nothing was changed; invoke report shows it; to try it again: rm -r {folder}"
        raise BumpError(f"{bump.current} stays: {bump.reason}", next_step=step)


def write_locks(paths: Paths, there: Paths, locks: list[str]) -> None:
    known = contents(paths.project, locks)
    for name, content in contents(there.project, locks).items():
        if known.get(name) != content:
            with files.atomic_file(paths.project / name) as out:
                out.write(content)
            show(f"written: {name}")


@contextlib.contextmanager
def side_project(paths: Paths) -> Iterator[Paths]:
    """Of the working tree, as it is, and not of a commit: pins that a person has just edited are tried, too."""
    ignore = shutil.ignore_patterns("__pycache__", f"{files.PARTIAL}*")
    with tempfile.TemporaryDirectory(prefix="sparkpin-bump-") as folder:
        with files.disk_errors(Path(folder)):
            for name in filter(lambda name: (paths.project / name).is_dir(), FOLDERS):
                shutil.copytree(paths.project / name, Path(folder, name), ignore=ignore, ignore_dangling_symlinks=True)
        yield dataclasses.replace(paths, project=Path(folder))


def lock_newer(side: Paths, stack: Stack, moving: list[ModelPin], what: What, hold: int) -> None:
    """Lock what is newer into the side's project. hold: days that a file must have been offered for. Errors: as of
    `lock_stack` and `lock_model`; network."""
    if what != "model":
        before = (datetime.now(UTC) - timedelta(days=hold)).date().isoformat() if hold else ""
        lock_stack(side, stack.name, newer=Newer(what, before))
    for one in moving if what in ("model", "all") else ():
        lock_model(side, one.name, newest=True)


def moving_of(recipe: Recipe, model: ModelPin) -> list[ModelPin]:
    """The model and its drafter, except one whose pin or recipe names commits: nothing is newer than those."""
    both = (model.owner(model.base), recipe.model_revision), (model.drafter, recipe.drafter_revision)
    found = [pin for pin, revision in both if pin and revision == UNRESOLVED]
    return [pin for pin in found if UNRESOLVED in (one.revision for one in pin.repositories.values())]


def differences(old: Pairing, new: Pairing) -> list[str]:
    """One line for each package and each repository of a model that is another."""
    found = [*changed_packages(old.stack_lock, new.stack_lock).values()]
    for name, entry in new.model_lock.repositories.items():
        before = old.model_lock.repositories.get(name)
        if before is None or before.revision != entry.revision:
            former = before.revision[:12] if before else "none"
            found.append(f"~ checkpoint {entry.repo}: {former} -> {entry.revision[:12]}")
    return found


def contents(project: Path, names: list[str]) -> dict[str, bytes]:
    """Of the files that are there."""
    return {name: (project / name).read_bytes() for name in names if (project / name).is_file()}
