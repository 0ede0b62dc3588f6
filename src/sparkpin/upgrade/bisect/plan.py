"""What two releases differ in, and what of that can be combined."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sparkpin.build.consistent import require_consistent
from sparkpin.core.errors import InputError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.history import operands
from sparkpin.releases.kept_inputs import reason
from sparkpin.releases.record import Release, Releases
from sparkpin.upgrade.bisect.changes import (
    STARTED,
    ReleaseChange,
    changes_of_command,
    mix_argv,
    mix_values,
    names_of,
)
from sparkpin.upgrade.bisect.mixed_project import Mixture

IMAGE = ReleaseChange("image", "as a whole", "good", "bad")


@dataclass(frozen=True)
class BisectPlan:
    good: Release
    bad: Release
    changes: tuple[ReleaseChange, ...]  # from the good release to the bad one
    mixture: Mixture | None  # None where images are taken as they are
    note: str = ""  # why they are

    def argv(self, chosen: Collection[ReleaseChange]) -> tuple[str, ...]:
        """With no change the good one's, with all of them the bad one's, whose flags may stand in another order."""
        flags = names_of(chosen, "flag")
        if len(chosen) == len(self.changes) or (flags and flags == names_of(self.changes, "flag")):
            return self.bad.argv
        return mix_argv(self.good.argv, self.bad.argv, flags) if flags else self.good.argv

    def env(self, chosen: Collection[ReleaseChange]) -> dict[str, str]:
        return mix_values(self.good.env, self.bad.env, names_of(chosen, "variable"))

    def of_image(self, chosen: Collection[ReleaseChange]) -> tuple[ReleaseChange, ...]:
        return tuple(change for change in chosen if change.kind not in STARTED)

    def image_of(self, chosen: Collection[ReleaseChange]) -> Release | None:
        """The release whose image it is; None for one that is neither's."""
        if not (some := self.of_image(chosen)):
            return self.good
        return self.bad if len(some) == len(self.of_image(self.changes)) else None

    def checkpoint_of(self, chosen: Collection[ReleaseChange]) -> Release:
        return self.bad if names_of(chosen, "checkpoint") else self.good

    def numbers(self, ids: Collection[str]) -> str:
        """Which of the changes, counted from 1."""
        places = [str(place) for place, change in enumerate(self.changes, start=1) if change.id in ids]
        return "none" if not places else "all" if len(places) == len(self.changes) else " ".join(places)


def make_plan(paths: Paths, good_name: str, bad_name: str) -> BisectPlan:
    """InputError for two without a difference that can be tried; IntegrityError for a record of something else than
    was built."""
    records = Releases(paths)
    good, bad = records.get(good_name), records.get(bad_name)
    for release in (good, bad):
        require_consistent(paths, release)
    found = operands.recorded_difference(paths, *(operands.release_side(paths, release) for release in (good, bad)))
    changes, mixture, note = [*changes_of_command(found)], None, ""
    if good.checkpoint_key != bad.checkpoint_key:  # as a whole: its steps stand on each other
        changes.append(ReleaseChange("checkpoint", "as a whole", good.checkpoint_key[:12], bad.checkpoint_key[:12]))
    if good.build_key != bad.build_key:
        try:
            mixture = Mixture.of(paths, good, bad)
            changes += mixture.changes(found)
        except SparkpinError as error:
            mixture, note = None, f"the images are taken as they are, not mixed: {reason(error)}"
            changes.append(IMAGE)
    if not changes:
        raise InputError(
            f"{good.tag} and {bad.tag} differ in nothing that can be tried by itself",
            next_step=f"invoke diff {good.tag} {bad.tag}",
        )
    return BisectPlan(good, bad, tuple(changes), mixture, note)
