"""What two releases differ in, and what of that can be combined."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sparkpin.build.consistent import require_consistent
from sparkpin.build.make import at_work, build_images, fetch_missing
from sparkpin.core.errors import InputError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.history import sides
from sparkpin.releases.kept_inputs import reason
from sparkpin.releases.record import Release, Releases, release_key
from sparkpin.upgrade.bisect.changes import STARTED, ReleaseChange, mix_argv, mix_values, names_of, of_command
from sparkpin.upgrade.bisect.mixed_project import Mixture

IMAGE = ReleaseChange("image", "as a whole", "good", "bad")


@dataclass(frozen=True)
class BisectPlan:
    good: Release
    bad: Release
    changes: tuple[ReleaseChange, ...]  # from the good release to the bad one
    mixture: Mixture | None  # None where images are taken as they are
    note: str = ""  # why they are

    def combine(self, paths: Paths, chosen: Sequence[ReleaseChange]) -> Release:
        """The good release with the chosen changes. It has no record; its tag names its image in the engine.

        No engine is asked where the image is one of the two that are there.
        """
        base, parts = self.good, [change for change in chosen if change.kind not in STARTED]
        if parts and len(parts) == sum(change.kind not in STARTED for change in self.changes):
            base = self.bad
        elif parts:
            base = self.build(paths, parts)
        checkpoint = (self.bad if names_of(chosen, "checkpoint") else self.good).checkpoint_key
        argv, env = self.argv(chosen), mix_values(self.good.env, self.bad.env, names_of(chosen, "variable"))
        key = release_key(base.build_key, checkpoint, argv, env)
        made = dataclasses.replace(base, key=key, checkpoint_key=checkpoint, argv=argv, env=env)
        return dataclasses.replace(made, smoke=None, state="built")

    def argv(self, chosen: Collection[ReleaseChange]) -> tuple[str, ...]:
        """With no change the good one's, with all of them the bad one's, whose flags may stand in another order."""
        flags = names_of(chosen, "flag")
        if len(chosen) == len(self.changes) or (flags and flags == names_of(self.changes, "flag")):
            return self.bad.argv
        return mix_argv(self.good.argv, self.bad.argv, flags) if flags else self.good.argv

    def build(self, paths: Paths, parts: Sequence[ReleaseChange]) -> Release:
        """The good release with an image that is neither's."""
        assert self.mixture
        with self.mixture.pairings(parts) as (project, pairings):
            mixed = dataclasses.replace(paths, project=project)
            with at_work(mixed) as engine:
                fetch_missing(mixed, engine, pairings)
                built = build_images(mixed, engine, pairings)[-1]
        made = dataclasses.replace(self.good, tag=built.ref, build_key=pairings[-1].rendered.key, size=built.size)
        return dataclasses.replace(made, image=built.config_digest, diff_ids=built.diff_ids)

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
    found = sides.recorded_difference(paths, *(sides.release_side(paths, release) for release in (good, bad)))
    changes, mixture, note = [*of_command(found)], None, ""
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
