"""The task `bisect`: plan, look at both ends, search, tell."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from sparkpin.cli.tasks import task
from sparkpin.core import files, terminal
from sparkpin.core.errors import InputError
from sparkpin.core.paths import Paths
from sparkpin.upgrade.bisect import state as states
from sparkpin.upgrade.bisect.changes import ReleaseChange, groups_of
from sparkpin.upgrade.bisect.plan import BisectPlan, identity, make_plan, numbers
from sparkpin.upgrade.bisect.search import Verdict, minimal
from sparkpin.upgrade.bisect.state import State, Trial
from sparkpin.upgrade.bisect.trial import Bench


class BisectSearch:
    """Tries each combination once, in this run or a former one."""

    def __init__(self, bench: Bench, path: Path, state: State) -> None:
        self.bench, self.path, self.state = bench, path, state
        self.reused = len(state.trials)

    @property
    def plan(self) -> BisectPlan:
        return self.bench.plan

    def verdict(self, chosen: Sequence[ReleaseChange]) -> Verdict:
        return self.trial(chosen).verdict

    def trial(self, chosen: Sequence[ReleaseChange]) -> Trial:
        ids = sorted(change.id for change in chosen)
        known = next((trial for trial in self.state.trials if trial.chosen == ids), None)
        if known is not None:
            return known
        number = len(self.state.trials) + 1
        terminal.say(f"trial {number}: changes {numbers(self.plan.changes, chosen)}")
        made = self.bench.attempt(chosen, number)
        self.state = self.state.model_copy(update={"trials": [*self.state.trials, made]})
        states.write(self.path, self.state)
        terminal.say(f"trial {number}: {made.verdict}, {terminal.printable(made.how)}")
        return made

    def ends(self) -> None:
        """InputError unless good is good and bad is bad: anything else would be a search for nothing."""
        for name, release, chosen in (("good", self.plan.good, ()), ("bad", self.plan.bad, self.plan.changes)):
            trial = self.trial(chosen)
            if trial.verdict != name:
                step = "correct the check, or choose other releases"
                if not trial.started:
                    step = "if that is what you look for: --unstarted-is-bad"
                raise InputError(
                    f"--{name} {release.tag} is {trial.verdict} ({trial.how}); log: {self.path.parent / trial.log}",
                    next_step=f"{step} (a new search, without what is known of this one: rm -r {self.path.parent})",
                )


@task("measure")
def bisect(
    *,
    good: Annotated[str, "release whose check is good", "TAG"],
    bad: Annotated[str, "release whose check is bad", "TAG"],
    check: Annotated[str, "shell command (docs/bisect.md): 0 is good, 125 inconclusive, any other code bad"],
    serve: Annotated[bool, "start a server for each trial: its address is SPARKPIN_ENDPOINT"] = False,
    unstarted_is_bad: Annotated[bool, "with --serve: a server that does not start is bad, not unresolved"] = False,
    limit: Annotated[int, "seconds that the check may take (default: 1800)", "SECONDS"] = 1800,
) -> None:
    """Find the change between two releases that makes a check fail."""
    if limit < 1:
        raise InputError(f"--limit: got {limit}, expected 1 or more (seconds)", next_step="--limit 1800")
    paths = Paths.from_env()
    plan = make_plan(paths, good, bad)
    terminal.show(f"- good {plan.good.tag}")
    terminal.show(f"+ bad  {plan.bad.tag}")
    for place, change in enumerate(plan.changes, start=1):
        terminal.show(f"{place:3} {terminal.printable(change.text)}")
    for note in plan.notes:
        terminal.show(f"note: {terminal.printable(note)}")
    name = identity(plan, check, serve=serve, unstarted_is_bad=unstarted_is_bad, limit=limit)
    folder = paths.home / states.FOLDER / name
    with files.lock(folder / states.LOCK, wait=False):
        path = folder / states.FILE
        fresh = State(
            good=plan.good.tag, bad=plan.bad.tag, check=check, changes=[c.text for c in plan.changes], trials=[]
        )
        bench = Bench(paths, plan, check, serve, unstarted_is_bad, limit, folder, terminal.say)
        search = BisectSearch(bench, path, states.read(path) or fresh)
        if search.reused:
            terminal.say(f"going on with a search that knows {terminal.count(search.reused, 'trial')} already ({path})")
        search.ends()
        found = minimal(groups_of(plan.changes), search.verdict)
        rest = tuple(change for change in plan.changes if change not in found)
        without = search.trial(rest)
    show(search, found, without)


def show(search: BisectSearch, found: Sequence[ReleaseChange], without: Trial) -> None:
    plan = search.plan
    by_id = {change.id: change for change in plan.changes}
    rows = []
    for place, trial in enumerate(search.state.trials, start=1):
        made = numbers(plan.changes, [by_id[name] for name in trial.chosen])
        rows.append((place, made, trial.verdict, f"{trial.seconds:.1f}", terminal.printable(trial.how)))
    terminal.table(("trial", "changes made", "verdict", "seconds", "seen"), rows)
    terminal.show(f"{'this change turns' if len(found) == 1 else 'these changes turn'} the check, on the good release:")
    for change in found:
        terminal.show(f"  {terminal.printable(change.text)}")
    if len(found) > 1:
        terminal.show("none of them can be left out: without any one the check is good or unresolved")
    they = "it" if len(found) == 1 else "them"
    terminal.show(f"the bad release without {they}: {without.verdict} ({terminal.printable(without.how)})")
    unresolved = sum(trial.verdict == "unresolved" for trial in search.state.trials)
    if unresolved:
        terminal.show(f"{terminal.count(unresolved, 'combination')} unresolved: a smaller change may hide there")
    terminal.show(f"logs: {search.path.parent}")
