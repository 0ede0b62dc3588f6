"""Combinations of changes, each made and judged once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparkpin.core.errors import BuildError, InputError, ManifestError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import printable, say
from sparkpin.releases.record import Release
from sparkpin.upgrade.bisect import state as states
from sparkpin.upgrade.bisect.changes import ReleaseChange, groups_of
from sparkpin.upgrade.bisect.plan import BisectPlan
from sparkpin.upgrade.bisect.search import minimal
from sparkpin.upgrade.bisect.state import State, Trial

UNFIT = (BuildError, InputError, ManifestError)
"""What shows that a combination does not fit together. All else (no disk, no engine, no network) ends the search."""


Judge = Callable[[Release, Path], Trial]
"""Verdict on a combination, how that was seen, and a file for what there is to read of it."""


@dataclass
class Search:
    """Tries each combination once, in this run or a former one. folder: of the state and the logs."""

    paths: Paths
    plan: BisectPlan
    judge: Judge
    folder: Path
    state: State

    @classmethod
    def begin(
        cls, paths: Paths, plan: BisectPlan, judge: Judge, folder: Path, check: str, known: Sequence[Trial] = ()
    ) -> Search:
        """As far as a former run came. known: trials that need not be made."""
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        changes = [change.text for change in plan.changes]
        fresh = State(good=plan.good.tag, bad=plan.bad.tag, check=check, changes=changes, trials=[*known])
        return cls(paths, plan, judge, folder, states.read(folder / states.FILE) or fresh)

    def trial(self, chosen: Sequence[ReleaseChange]) -> Trial:
        ids = tuple(sorted(change.id for change in chosen))
        if known := next((trial for trial in self.state.trials if trial.chosen == ids), None):
            return known
        number, began = len(self.state.trials) + 1, time.monotonic()
        say(f"trial {number}: changes {self.plan.numbers(ids)}")
        log = self.folder / f"{number:03}.log"
        log.write_bytes(b"")  # a run that was killed within this trial may have left one
        try:
            release = self.plan.combine(self.paths, chosen)
        except UNFIT as error:
            log.write_text(f"{error}\n")
            made = Trial(verdict="unresolved", how=f"cannot be made: {error.message.splitlines()[0]}")
        else:
            made = self.judge(release, log)
        seconds = round(time.monotonic() - began, 1)
        made = made.model_copy(update={"chosen": ids, "seconds": seconds, "log": log.name})
        self.state = self.state.model_copy(update={"trials": [*self.state.trials, made]})
        states.write(self.folder / states.FILE, self.state)
        say(f"trial {number}: {made.verdict}, {printable(made.how)}")
        return made

    def culprits(self) -> tuple[ReleaseChange, ...]:
        """The changes that are bad together, of which none can be left out. None at all is good, all are bad."""
        return minimal(groups_of(self.plan.changes), lambda some: self.trial(some).verdict)
