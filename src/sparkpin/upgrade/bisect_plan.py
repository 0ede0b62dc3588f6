"""What two releases differ in, as changes that can be made one by one, and the release with some of them.

Images are made of the files that both releases keep, mixed in a temporary folder: the user's tree is never touched. A
file that only one release has is always there: what no manifest names has no effect.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from sparkpin.build.consistent import require_consistent
from sparkpin.build.make import at_work, build_images, fetch_missing
from sparkpin.build.pair import Pairing, pair
from sparkpin.core.errors import InputError, ManifestError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.history import sides
from sparkpin.history.diff import Difference, PartChange, flag_words
from sparkpin.history.diff_text import part_row, value_line
from sparkpin.pins import manifests
from sparkpin.releases.kept_inputs import lay_out, read_inputs, reason
from sparkpin.releases.record import Release, Releases, release_key

T = TypeVar("T")
Kind = Literal["flag", "variable", "checkpoint", "mod", "wheel", "deb", "file", "image"]
STARTED: tuple[Kind, ...] = ("flag", "variable", "checkpoint")
"""What needs another start, and no other image. Those come first: they are the cheapest to try."""
ORDER: tuple[Kind, ...] = (*STARTED, "mod", "file", "wheel", "deb", "image")


@dataclass(frozen=True)
class ReleaseChange:
    """One thing that differs in the bad release. text: for people."""

    kind: Kind
    name: str
    text: str

    @property
    def id(self) -> str:
        return f"{self.kind} {self.name}"


def of_command(found: Difference) -> Iterator[ReleaseChange]:
    """Flags and variables: how the server is started."""
    yield from (ReleaseChange("flag", change.name, value_line(change, named=True)) for change in found.flags)
    yield from (ReleaseChange("variable", change.name, value_line(change)) for change in found.env)


def changes_of_parts(kind: Kind, changes: Sequence[PartChange]) -> Iterator[ReleaseChange]:
    for change in changes:
        sign = {"added": "+", "removed": "-"}.get(change.verdict, "~")
        yield ReleaseChange(kind, change.name, f"{sign} {kind} {change.name}: {part_row(change)[2]}")


def names_of(chosen: Collection[ReleaseChange], kind: str) -> set[str]:
    return {change.name for change in chosen if change.kind == kind}


def mix_argv(good: Sequence[str], bad: Sequence[str], chosen: Collection[str]) -> tuple[str, ...]:
    """The good command with those flags of the bad one that are chosen by name, in the good one's order."""
    values = mix_values(flag_words(good), flag_words(bad), chosen)
    return tuple(word for words in values.values() for word in shlex.split(words))


def mix_values(good: Mapping[str, T], bad: Mapping[str, T], chosen: Collection[str]) -> dict[str, T]:
    """The good values, with the bad ones in the place of those that are chosen by name."""
    found = {name: (bad if name in chosen else good).get(name) for name in [*good, *bad]}
    return {name: value for name, value in found.items() if value is not None}


MODELS = "pins/models/"
APART = ("mods/", MODELS, manifests.FAMILIES)
"""Files that are no changes of their own: mods are taken as a whole, models go with the recipe, families are flags."""


@dataclass(frozen=True)
class Mixture:
    """Two releases with the files that they keep, by path."""

    good: Release
    bad: Release
    old: Mapping[str, bytes]  # of the good one
    new: Mapping[str, bytes]  # of the bad one

    @classmethod
    def of(cls, paths: Paths, good: Release, bad: Release) -> Mixture:
        """SparkpinError where files of one are not kept; InputError for two that have too little in common."""
        for what in ("stack", "recipe", "stage"):
            if getattr(good, what) != getattr(bad, what):
                raise InputError(f"they are of another {what}: {getattr(good, what)} and {getattr(bad, what)}")
        return cls(good, bad, read_inputs(paths, good), read_inputs(paths, bad))

    @property
    def lock(self) -> str:
        return f"pins/stacks/{self.good.stack}.lock"

    def changes(self, found: Difference) -> list[ReleaseChange]:
        """What decides the image, as finely as it can be mixed. InputError where this is not all that does."""
        mods = [change for change in found.parts["mods"] if change.before and change.after]
        parts = [*changes_of_parts("mod", mods)]
        parts += [*changes_of_parts("wheel", found.parts["wheels"]), *changes_of_parts("deb", found.parts["debs"])]
        paths = [path for path in sorted(self.old.keys() & self.new.keys()) if self.old[path] != self.new[path]]
        paths = [path for path in paths if path != self.lock and not path.startswith(APART)]
        files = [ReleaseChange("file", path, f"~ file {path}") for path in paths]
        everything = [*parts, *files]
        if self.key_of([]) != self.good.build_key or self.key_of(everything) != self.bad.build_key:
            raise InputError("this sparkpin makes other images of the releases' files")
        for change in files:  # a remark in a manifest, or what only the server's flags follow from, decides no image
            rest = [other for other in everything if other != change]
            if self.key_of([change]) == self.good.build_key and self.key_of(rest) == self.bad.build_key:
                everything.remove(change)
        return everything

    def key_of(self, chosen: Collection[ReleaseChange]) -> str:
        """The build key; "" where these changes do not fit together."""
        with contextlib.suppress(InputError, ManifestError), self.pairings(chosen) as (_, pairings):
            return pairings[-1].rendered.key
        return ""

    @contextlib.contextmanager
    def pairings(self, chosen: Collection[ReleaseChange]) -> Iterator[tuple[Path, tuple[Pairing, ...]]]:
        """A folder with the good files and the chosen changes made to them, and the chain of images that it makes.
        ManifestError and the like where it makes none."""
        ids, known = {change.id for change in chosen}, {self.change_of(path) for path in self.old}
        files = {}
        for path in self.old.keys() | self.new.keys():
            change = self.change_of(path)
            side = self.old if change in known and change not in ids else self.new
            if path in side:
                files[path] = side[path]
        with tempfile.TemporaryDirectory(prefix="sparkpin-bisect-") as folder:
            lay_out(Path(folder), files, {*self.good.executable, *self.bad.executable})
            self.write_lock(Path(folder), chosen)
            yield Path(folder), pair(Path(folder), self.good.recipe, stage=self.good.stage)

    def change_of(self, path: str) -> str:
        """The id of the change that a file is a part of. A recipe names commits of the models' pins; a mod is taken as
        a whole."""
        if path.startswith("mods/"):
            return f"mod {path.split('/')[1]}"
        return f"file recipes/{self.good.recipe}.yaml" if path.startswith(MODELS) else f"file {path}"

    def write_lock(self, project: Path, chosen: Collection[ReleaseChange]) -> None:
        """The lock in the folder with the chosen packages, for the pin that lies beside it. The time of a lock only
        says when Debian's archive had its packages, and is no change of its own."""
        lock, other = json.loads(self.old[self.lock]), json.loads(self.new[self.lock])
        for kind, key in (("wheel", "wheels"), ("deb", "debs")):
            before, after = ({row["name"]: row for row in one[key]} for one in (lock, other))
            rows = mix_values(before, after, names_of(chosen, kind))
            lock[key] = [rows[name] for name in sorted(rows)]
        if names_of(chosen, "deb") and "time" in other:
            lock["time"] = other["time"]
        lock["inputs"] = manifests.stack_inputs(manifests.load_stack(project, self.good.stack))
        (project / self.lock).write_text(json.dumps(lock))


IMAGE = ReleaseChange("image", "as a whole", "~ image as a whole")


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
        if len(chosen) in (0, len(self.changes)):
            return self.bad if chosen else self.good
        base, parts = self.good, [change for change in chosen if change.kind not in STARTED]
        if parts and len(parts) == sum(change.kind not in STARTED for change in self.changes):
            base = self.bad
        elif parts:
            base = self.build(paths, parts)
        checkpoint = (self.bad if names_of(chosen, "checkpoint") else self.good).checkpoint_key
        flags = names_of(chosen, "flag")
        argv = mix_argv(self.good.argv, self.bad.argv, flags) if flags else self.good.argv
        env = mix_values(self.good.env, self.bad.env, names_of(chosen, "variable"))
        key = release_key(base.build_key, checkpoint, argv, env)
        made = dataclasses.replace(base, key=key, checkpoint_key=checkpoint, argv=argv, env=env)
        return dataclasses.replace(made, smoke=None, state="built")

    def build(self, paths: Paths, parts: Sequence[ReleaseChange]) -> Release:
        """The good release with an image that is neither's."""
        assert self.mixture
        with self.mixture.pairings(parts) as (project, pairings):
            mixed = dataclasses.replace(paths, project=project)
            with at_work(mixed) as engine:
                fetch_missing(mixed, engine, pairings)
                built = build_images(mixed, engine, pairings)[-1]
        image = pairings[-1].rendered
        made = dataclasses.replace(self.good, tag=image.ref, build_key=image.key, size=built.size)
        return dataclasses.replace(made, image=built.config_digest, diff_ids=built.diff_ids)


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
        keys = f"{good.checkpoint_key[:12]} -> {bad.checkpoint_key[:12]}"
        changes.append(ReleaseChange("checkpoint", "as a whole", f"~ checkpoint: {keys}"))
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
