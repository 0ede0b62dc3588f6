"""What two releases differ in, and what of that can be combined."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from sparkpin.build.consistent import require_consistent
from sparkpin.core.errors import InputError, SparkpinError
from sparkpin.core.files import sha256_file
from sparkpin.core.paths import Paths
from sparkpin.history import sides
from sparkpin.releases.kept_inputs import reason
from sparkpin.releases.record import Release, Releases
from sparkpin.upgrade.bisect.changes import STARTED, ReleaseChange, argv_with, mixed, of_command
from sparkpin.upgrade.bisect.mixed_project import Mixture

IMAGE = ReleaseChange("image", "as a whole", "good", "bad")


@dataclass(frozen=True)
class BisectPlan:
    good: Release
    bad: Release
    changes: tuple[ReleaseChange, ...]  # from the good release to the bad one
    mixture: Mixture | None  # None where images are taken as they are
    notes: tuple[str, ...]  # what cannot be combined, and why

    def argv(self, chosen: Collection[ReleaseChange]) -> tuple[str, ...]:
        """With no change the good one's, with all of them the bad one's, whose flags may stand in another order."""
        flags = names(chosen, "flag")
        if len(chosen) == len(self.changes) or (flags and flags == names(self.changes, "flag")):
            return self.bad.argv
        return argv_with(self.good.argv, self.bad.argv, flags) if flags else self.good.argv

    def env(self, chosen: Collection[ReleaseChange]) -> dict[str, str]:
        return mixed(self.good.env, self.bad.env, names(chosen, "variable"))

    def of_image(self, chosen: Collection[ReleaseChange]) -> tuple[ReleaseChange, ...]:
        return tuple(change for change in chosen if change.kind not in STARTED)

    def image_of(self, chosen: Collection[ReleaseChange]) -> Release | None:
        """The release whose image it is; None for one that is neither's."""
        some = self.of_image(chosen)
        if not some:
            return self.good
        return self.bad if len(some) == len(self.of_image(self.changes)) else None

    def checkpoint_of(self, chosen: Collection[ReleaseChange]) -> Release:
        return self.bad if any(change.kind == "checkpoint" for change in chosen) else self.good


def names(chosen: Collection[ReleaseChange], kind: str) -> set[str]:
    return {change.name for change in chosen if change.kind == kind}


def make_plan(paths: Paths, good_name: str, bad_name: str) -> BisectPlan:
    """InputError for two that no change parts; IntegrityError where a record is not of what was built."""
    records = Releases(paths)
    good, bad = records.get(good_name), records.get(bad_name)
    if good.key == bad.key:
        raise InputError(f"{good.tag} and {bad.tag} are one release", next_step="invoke images lists the releases")
    for release in (good, bad):
        require_consistent(paths, release)
    found = sides.recorded_difference(paths, *(sides.release_side(paths, release) for release in (good, bad)))
    changes, notes, mixture = list(of_command(found)), [], None
    if good.checkpoint_key != bad.checkpoint_key:
        changes.append(ReleaseChange("checkpoint", "as a whole", good.checkpoint_key[:12], bad.checkpoint_key[:12]))
        notes.append("a checkpoint is taken as a whole: its steps stand on each other")
    if good.build_key != bad.build_key:
        try:
            mixture = Mixture.of(paths, good, bad)
            parts = list(mixture.changes(found))
            mixture.check(parts)
            changes += parts
            if good.stage != bad.stage:
                notes.append("a stage is taken as a whole; each stage between has releases of its own to bisect")
        except SparkpinError as error:
            mixture = None
            changes.append(IMAGE)
            notes.append(f"the images are taken as they are, not mixed: {reason(error)}")
    if found.moved:
        notes.append("the flags stand in another order, too: not tried by itself")
    if not changes:
        raise InputError(
            f"{good.tag} and {bad.tag} differ in nothing that can be tried by itself",
            next_step=f"invoke diff {good.tag} {bad.tag}",
        )
    return BisectPlan(good, bad, tuple(changes), mixture, tuple(notes))


def identity(plan: BisectPlan, check: str, *, serve: bool, unstarted_is_bad: bool, limit: float) -> str:
    """Names a search: the same one goes on where it was broken off. Files that the check names count by content."""
    named = map(os.path.expanduser, words_of(check))
    scripts = [sha256_file(Path(path))[0] for path in named if os.path.isfile(path)]  # False for a word of any length
    changes = [change.id for change in plan.changes]
    value = [plan.good.key, plan.bad.key, changes, check, scripts, os.getcwd(), serve, unstarted_is_bad, limit]
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def words_of(check: str) -> list[str]:
    """As a shell takes them apart, without what `>` writes to. As they stand where a shell could not."""
    lexer = shlex.shlex(check, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        words = ["", *lexer]
    except ValueError:
        return check.split()
    return [word for before, word in pairwise(words) if ">" not in before]


def numbers(changes: Sequence[ReleaseChange], chosen: Collection[ReleaseChange]) -> str:
    """Which of the changes, counted from 1."""
    places = [str(place) for place, change in enumerate(changes, start=1) if change in chosen]
    return "none" if not places else "all" if len(places) == len(changes) else " ".join(places)
