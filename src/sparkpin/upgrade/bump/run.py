"""A bump from its beginning to its end: lock on the side, try, judge, search for what is to blame, promote."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from sparkpin.build.consistent import require_consistent
from sparkpin.build.pair import pair, require_model_fits
from sparkpin.core import files, terminal
from sparkpin.core.errors import BumpError, InputError, IntegrityError, ManifestError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say, show
from sparkpin.host.engine import engine_of
from sparkpin.pins import manifests
from sparkpin.releases.container import require_image
from sparkpin.releases.kept_inputs import project_of
from sparkpin.releases.record import Release, now
from sparkpin.releases.runs_here import obstacle
from sparkpin.upgrade.bisect import state as states
from sparkpin.upgrade.bisect.plan import make_plan
from sparkpin.upgrade.bisect.trial import Search
from sparkpin.upgrade.bump import record, side
from sparkpin.upgrade.bump.record import Bump, Step
from sparkpin.upgrade.bump.steps import FAILURES, Candidate, Commands

STEPS = ("build", "inspect", "smoke", "quality", "speed")


@dataclass(frozen=True)
class Asked:
    """what, to, hold: see `side`; quick: fewer texts, questions and cells; apply: promote it and write the locks."""

    what: side.What
    to: str
    hold: int
    quick: bool
    apply: bool


@dataclass
class Run:
    """A bump under way. folder: of its record."""

    candidate: Candidate
    folder: Path
    bump: Bump

    def keep(self, **changes: object) -> None:
        self.bump = self.bump.model_copy(update=changes)
        record.write(self.folder, self.bump)

    def judge(self) -> None:
        """The verdict, unless a former run of the same versions has it. BumpError where the current release stays."""
        candidate, folder = self.candidate, self.folder
        show(f"newer for {candidate.current.tag}:")
        for line in self.bump.changes:
            show(f"  {terminal.printable(line)}")
        require_consistent(candidate.paths, candidate.current)
        if why := obstacle(candidate.paths, candidate.engine, candidate.current):
            raise InputError(
                f"{candidate.current.tag} and what is newer cannot run here: {why}",
                next_step="run bump on a machine that can serve it",
            )
        if known := record.read(folder):
            self.bump = known
            say(f"known already: {terminal.count(len(known.steps), 'step')} ({folder / record.FILE})")
        if not self.bump.verdict:
            self.carry_out()
        rows = [
            (one.name, "ok" if one.passed else "failed", terminal.seconds(one.seconds), terminal.printable(one.detail))
            for one in self.bump.steps
        ]
        terminal.table(("step", "verdict", "seconds", "result"), rows)
        if self.bump.guilty:
            show(f"because of {terminal.printable(self.bump.guilty)}")
        show(f"verdict: {self.bump.verdict} ({folder / record.FILE})")
        if self.bump.verdict == "stay":
            step = f"nothing was changed; invoke report shows it; to try it again: rm -r {folder}"
            raise BumpError(f"{self.bump.current} stays: {self.bump.reason}", next_step=step)

    def carry_out(self) -> None:
        """Each step of which no former run has the result, until one fails."""
        results: dict[str, Step] = {one.name: one for one in self.bump.steps}
        for number, name in enumerate(STEPS, start=1):
            if not (step := results.get(name)):
                say(f"step {number} of {len(STEPS)}: {name}")
                step = self.try_step(name)
                self.keep(steps=(*self.bump.steps, step), release=self.candidate.pairings[-1].tag)
            if not step.passed:
                guilty = "" if name == "build" else self.blame(step)
                self.keep(verdict="stay", reason=f"{name}: {step.detail}", guilty=guilty)
                return
        self.keep(verdict="promote")

    def try_step(self, name: str) -> Step:
        candidate, began = self.candidate, time.monotonic()
        try:
            return Step(name=name, passed=True, detail=candidate.run(name), seconds=seconds_since(began))
        except FAILURES as error:
            require_consistent(candidate.paths, candidate.current)  # raises where that is what is wrong
            require_image(candidate.engine, candidate.current)
            return Step(name=name, passed=False, detail=error.message.splitlines()[0], seconds=seconds_since(began))

    def blame(self, step: Step) -> str:
        """The changes that make a step fail, or why they cannot be found."""
        candidate = self.candidate
        try:
            plan = make_plan(candidate.paths, candidate.current.tag, candidate.release.tag)
        except (InputError, IntegrityError) as error:
            return f"what cannot be searched: {error.message}"
        say(f"{step.name} failed; which of {terminal.count(len(plan.changes), 'change')} is to blame?")
        ids = tuple(sorted(change.id for change in plan.changes))
        known = [states.Trial(chosen=ids, verdict="bad", how=step.detail)]
        if step.name in ("quality", "speed"):  # they are against the good one itself
            known.append(states.Trial(verdict="good", how=""))
        folder = self.folder / states.FOLDER
        search = Search.begin(candidate.paths, plan, candidate.judge(step.name), folder, step.name, known)
        if search.trial(()).verdict != "good":
            return "something else: the current release does the same now"
        return ", ".join(change.text for change in search.culprits())


def seconds_since(began: float) -> float:
    return round(time.monotonic() - began, 1)


def bump(paths: Paths, current: Release, asked: Asked, commands: Commands) -> None:
    """Try what is newer than the current release. BumpError where that one stays though there is something newer."""
    root = paths.home / record.FOLDER
    recipe = manifests.load_recipe(paths.project, current.recipe)
    stack, model = manifests.load_stack(paths.project, recipe.stack), manifests.model_of(paths.project, recipe)
    moving, locks = side.moving_of(recipe, model), side.locks_of(stack, model)
    with files.lock(root / record.LOCK, wait=False), side.side_project(paths) as there:
        fresh = Bump(recipe=recipe.name, what=asked.what, time=now(), current=current.tag, changes=[])
        began, stack = time.monotonic(), side.raise_pin(there, stack, asked.to) if asked.to else stack
        try:
            side.lock_newer(there, stack, moving, asked.what, asked.hold)
            pairings = pair(there.project, recipe.name, stage=current.stage)
            require_model_fits(paths, pairings[-1])
        except (IntegrityError, ManifestError) as error:
            step = Step(name="lock", passed=False, detail=error.message, seconds=seconds_since(began))
            reason = f"lock: {error.message}"
            fresh = fresh.model_copy(update={"steps": (step,), "verdict": "stay", "reason": reason})
            record.write(root / manifests.digest_of([current.key, reason])[:12], fresh)
            raise BumpError(f"{current.tag} stays: {reason}", next_step=error.next_step) from None
        new, watched = pairings[-1], [*locks, *pairings[-1].inputs]
        before = side.hashes(paths.project, watched)
        with project_of(paths, current) as project:
            changes = side.differences(pair(project, recipe.name, stage=current.stage)[-1], new)
        if not changes:
            show(f"nothing newer for {recipe.name}: {current.tag} stays")
            for line in side.fixed_by(stack, recipe, model, moving, asked.what):
                show(f"fixed by {line}")
            if asked.apply and new.tag == current.tag:  # a run may have been killed between promotion and lock
                write_locks(paths, there, locks)
            return
        folder = root / manifests.digest_of([current.key, new.key, asked.quick])[:12]
        fresh = fresh.model_copy(update={"changes": changes})
        going = Run(Candidate(there, engine_of(paths), current, pairings, commands), folder, fresh)
        going.judge()
        if not asked.apply:
            show("nothing was changed; next: the same command with --apply, which promotes it and writes the lock")
            return
        after = side.hashes(paths.project, watched)
        if edited := [name for name in watched if before.get(name) != after.get(name)]:
            next_step = "nothing was promoted or written; the same command again"
            raise InputError(f"{edited[0]} was changed while newer versions were tried", next_step=next_step)
        commands.promote(new.tag)
        going.keep(applied=now())
        write_locks(paths, there, locks)


def write_locks(paths: Paths, there: Paths, locks: list[str]) -> None:
    known = side.hashes(paths.project, locks)
    for name, sha256 in side.hashes(there.project, locks).items():
        if known.get(name) != sha256:
            with files.atomic_file(paths.project / name) as out:
                out.write((there.project / name).read_bytes())
            show(f"written: {name}")
