"""The task `bisect`: plan, look at both ends, search, print."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from sparkpin.build.make import checkpoint_of
from sparkpin.cli.tasks import task
from sparkpin.core import files, terminal
from sparkpin.core.errors import InputError
from sparkpin.core.paths import Paths
from sparkpin.upgrade.bisect import state as states
from sparkpin.upgrade.bisect.check import Check
from sparkpin.upgrade.bisect.plan import make_plan
from sparkpin.upgrade.bisect.trial import Search


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
    plan, asked = make_plan(paths, good, bad), Check(check, serve, unstarted_is_bad, limit)
    terminal.show(f"- good {plan.good.tag}")
    terminal.show(f"+ bad  {plan.bad.tag}")
    for place, change in enumerate(plan.changes, start=1):
        terminal.show(f"{place:3} {terminal.printable(change.text)}")
    if plan.note:
        terminal.show(f"note: {terminal.printable(plan.note)}")
    folder = paths.home / states.FOLDER / asked.identity(plan)
    with files.lock(folder / states.LOCK, wait=False):
        search = Search.begin(paths, plan, partial(asked.judge, paths), folder, check)
        if known := search.state.trials:
            terminal.say(f"known already: {terminal.count(len(known), 'trial')} ({folder})")
        for release in (plan.good, plan.bad) if serve else ():
            checkpoint_of(paths, release)
        require_ends(search)
        found = search.culprits()
        without = search.trial(tuple(change for change in plan.changes if change not in found))
    terminal.show("the check fails on the good release with:")
    for change in found:
        terminal.show(f"  {terminal.printable(change.text)}")
    terminal.show(f"the bad release without this: {without.verdict} ({terminal.printable(without.how)})")
    if unresolved := sum(trial.verdict == "unresolved" for trial in search.state.trials):
        terminal.show(f"{terminal.count(unresolved, 'combination')} unresolved: a smaller change may hide there")
    terminal.show(f"trials and logs: {folder}")


def require_ends(search: Search) -> None:
    """InputError unless good is good and bad is bad: anything else would be a search for nothing."""
    plan = search.plan
    for name, release, chosen in (("good", plan.good, ()), ("bad", plan.bad, plan.changes)):
        trial = search.trial(chosen)
        if trial.verdict != name:
            wrong = "correct the check, or choose other releases"
            step = wrong if trial.started else "if that is what you look for: --unstarted-is-bad"
            raise InputError(
                f"--{name} {release.tag} is {trial.verdict} ({trial.how}); log: {search.folder / trial.log}",
                next_step=f"{step} (to forget what is known of this search: rm -r {search.folder})",
            )
