"""The task `bisect`: plan, look at both ends, search, print."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated

from sparkpin.build.make import checkpoint_of
from sparkpin.cli.tasks import task
from sparkpin.core import files, locks
from sparkpin.core.errors import InputError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import count, printable, show
from sparkpin.upgrade.bisect.check import Check
from sparkpin.upgrade.bisect.plan import ReleaseChange, make_plan
from sparkpin.upgrade.bisect.search import FOLDER, Search


@task("measure")
def bisect(
    paths: Paths,
    *,
    good: Annotated[str, "release whose check is good", "TAG"],
    bad: Annotated[str, "release whose check is bad", "TAG"],
    check: Annotated[str, "shell command (docs/bisect.md): 0 is good, 124 and 125 inconclusive, any other code bad"],
    serve: Annotated[bool, "start a server for each trial: its address is SPARKPIN_ENDPOINT"] = False,
) -> None:
    """Find the change between two releases that makes a check fail."""
    plan, asked = make_plan(paths, good, bad), Check(check, serve)
    show(f"- good {plan.good.tag}\n+ bad  {plan.bad.tag}")
    show_changes(plan.changes)
    if plan.note:
        show(f"note: {printable(plan.note)}")
    folder = paths.home / FOLDER / asked.identity(plan)
    search = Search(paths, plan, partial(asked.judge, paths), folder)
    with locks.claim(paths), files.lock(folder / ".lock", wait=False):  # a prune waits
        for release in (plan.good, plan.bad) if serve else ():
            checkpoint_of(paths, release)
        require_ends(search)
        found = search.culprits()
        without = search.trial(tuple(change for change in plan.changes if change not in found))
    show("the check fails on the good release with:")
    show_changes(found)
    show(f"the bad release without this: {without.verdict} ({printable(without.how)})")
    if unresolved := sum(trial.verdict == "unresolved" for trial in search.trials.values()):
        show(f"{count(unresolved, 'combination')} unresolved: a smaller change may hide there")
    show(f"trials and logs: {folder}")


def show_changes(changes: Sequence[ReleaseChange]) -> None:
    show("\n".join(f"  {printable(change.text)}" for change in changes))


def require_ends(search: Search) -> None:
    """InputError unless good is good, and bad is bad or does not start: anything else is a search for nothing."""
    good, bad = search.trial(()), search.trial(search.plan.changes)
    step = f"correct the check, or choose other releases; to forget this search: rm -r {search.folder}"
    if good.verdict != "good":
        raise InputError(f"--good {search.plan.good.tag} is {good.verdict} ({good.how})", next_step=step)
    if bad.verdict != "bad" and bad.started:
        raise InputError(f"--bad {search.plan.bad.tag} is {bad.verdict} ({bad.how})", next_step=step)
