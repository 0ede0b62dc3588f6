"""Combinations of changes, each made and judged once, until the smallest that fails is found: delta debugging.

A. Zeller, R. Hildebrandt: Simplifying and Isolating Failure-Inducing Input, IEEE Transactions on Software Engineering
28(2), 2002: `ddmin`. Groups of changes first, then single ones, after G. Misherghi, Z. Su: HDD: Hierarchical Delta
Debugging, ICSE 2006.

Each trial leaves a file and a log in SPARKPIN_HOME/bisect/<id>, so that a killed search goes on. Nobody else reads
them: a check may print what is secret.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import TypeAdapter

from sparkpin.core.errors import BuildError, InputError, ManifestError
from sparkpin.core.files import write_json
from sparkpin.core.models import StrictModel
from sparkpin.core.terminal import printable, say
from sparkpin.pins.manifests import digest_of
from sparkpin.releases.record import PRIVATE, Release, read_optional
from sparkpin.upgrade.bisect_plan import KINDS, BisectPlan

FOLDER = "bisect"  # of SPARKPIN_HOME, and of a bump
UNFIT = (BuildError, InputError, ManifestError)
"""What shows that a combination does not fit together. All else (no disk, no engine, no network) ends the search."""


class Trial(StrictModel):
    verdict: Literal["good", "bad", "unresolved"]
    how: str  # what was seen, in a few words
    started: bool = True  # False where its server did not become ready


T = TypeVar("T")
IsBad = Callable[[tuple[T, ...]], bool]
"""Whether the good side with some of the changes, which keep their order, is bad. What is unresolved is not."""
Judge = Callable[[Release, Path], Trial]
"""Verdict on a combination, how that was seen, and a file for what there is to read of it."""


@dataclass(frozen=True)
class Search:
    """Tries each combination once, in this run or a former one. folder: of results and logs; trials: changes -> what is
    known of them."""

    plan: BisectPlan
    judge: Judge
    folder: Path
    trials: dict[frozenset[str], Trial] = field(default_factory=dict)

    def trial(self, chosen: Collection[str]) -> Trial:
        ids = frozenset(chosen)
        if ids not in self.trials:
            log = self.folder / f"{digest_of(sorted(ids))[:12]}.log"
            file, step = log.with_suffix(".json"), f"rm -r {self.folder}: the search begins again"
            known = read_optional(file, TypeAdapter(Trial), next_step=step)
            self.trials[ids] = known or self.judge_now(ids, log)
            write_json(file, self.trials[ids].model_dump(mode="json"), PRIVATE)
        return self.trials[ids]

    def judge_now(self, chosen: Collection[str], log: Path) -> Trial:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        title = f"trial {len(self.trials) + 1}"
        say(f"{title}: {len(chosen)} of {len(self.plan.changes)} changes ({log})")
        log.write_bytes(b"")  # a run that was killed within this trial may have left one
        try:
            release = self.plan.combine(chosen)
        except UNFIT as error:
            log.write_text(f"{error}\n")
            trial = Trial(verdict="unresolved", how=f"cannot be made: {error.message.splitlines()[0]}")
        else:
            trial = self.judge(release, log)
        say(f"{title}: {trial.verdict}, {printable(trial.how)}")
        return trial

    def culprits(self) -> tuple[str, ...]:
        """The changes that fail together as the bad release does, of which none can be left out. Where its server does
        not start, these are the changes that keep a server from starting."""
        bad = self.trial(self.plan.changes)

        def is_bad(some: Sequence[str]) -> bool:
            trial = self.trial(some)
            return (trial.verdict, trial.started) == (bad.verdict, bad.started)

        return minimal([[change for change in self.plan.changes if change.startswith(kind)] for kind in KINDS], is_bad)


def minimal(groups: Sequence[Sequence[T]], is_bad: IsBad[T]) -> tuple[T, ...]:
    """Changes that are bad together, of which none can be left out: without any one of them they are not bad.

    groups: all changes, those of a kind together; all of them at once are known to be bad, none of them to be good.
    A group that is not needed goes as a whole.
    """
    guilty = ddmin([group for group in groups if group], lambda some: is_bad(tuple(chain(*some))))
    return ddmin(tuple(chain(*guilty)), is_bad)


def ddmin(changes: Sequence[T], is_bad: IsBad[T]) -> tuple[T, ...]:
    """As in the article; `changes` themselves are known to be bad.

    At most n*n + 3n tests of n changes, about 2 log2(n) where one change alone is to blame.
    """
    left, parts = tuple(changes), 2
    while len(left) > 1:
        pieces = split(left, parts)
        rests = [tuple(one for one in left if one not in piece) for piece in pieces] if parts > 2 else []
        if piece := next(filter(is_bad, pieces), None):
            left, parts = piece, 2
        elif rest := next(filter(is_bad, rests), None):
            left, parts = rest, max(parts - 1, 2)
        elif parts >= len(left):
            break
        else:
            parts = min(2 * parts, len(left))
    return left


def split(changes: tuple[T, ...], parts: int) -> list[tuple[T, ...]]:
    """In as many pieces of nearly the same length; the first are the shorter ones."""
    ends = [len(changes) * place // parts for place in range(parts + 1)]
    return [changes[start:end] for start, end in pairwise(ends)]
