"""What two releases differ in, as changes that can be made one by one, and the release with some of them.

Images are made of the files that both releases keep, mixed in a temporary folder: the user's tree is never touched. A
file that only one release has is always there: what no manifest names has no effect.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from sparkpin.build.consistent import require_consistent
from sparkpin.build.make import at_work, build_images, fetch_missing
from sparkpin.build.pair import Pairing, pair
from sparkpin.core.errors import InputError, ManifestError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.history.diff import VersionedPart, flag_words, parts_apart, values_apart
from sparkpin.history.diff_text import part_row, value_line
from sparkpin.pins import manifests
from sparkpin.pins.schema import LockedFile, StackLock
from sparkpin.releases.kept_inputs import project_of, reason
from sparkpin.releases.record import Release, Releases, release_key

T = TypeVar("T")
F = TypeVar("F", bound=LockedFile)
Changes = dict[str, str]
"""What differs in the bad release: ids (`flag --seed`: its kind and its name) -> a line for people."""
KINDS = ("flag", "variable", "checkpoint", "mod", "file", "wheel", "deb", "image")
"""The cheapest to try first: the first three need another start, and no other image."""
CHECKPOINT, IMAGE = "checkpoint as a whole", "image as a whole"


def of_image(changes: Collection[str]) -> frozenset[str]:
    return frozenset(change for change in changes if not change.startswith(KINDS[:3]))


def changed_starts(good: Release, bad: Release) -> Changes:
    """Flags, variables, and the checkpoint: as a whole, since its steps stand on each other."""
    flags = values_apart(flag_words(good.argv), flag_words(bad.argv))
    found = {f"flag {change.name}": value_line(change, named=True) for change in flags}
    found |= {f"variable {change.name}": value_line(change) for change in values_apart(good.env, bad.env)}
    if good.checkpoint_key != bad.checkpoint_key:
        found[CHECKPOINT] = f"~ checkpoint: {good.checkpoint_key[:12]} -> {bad.checkpoint_key[:12]}"
    return found


def changed_packages(old: StackLock, new: StackLock) -> Changes:
    found = {}
    for kind, *sides in (("wheel", old.wheels, new.wheels), ("deb", old.debs, new.debs)):
        before, after = ({row.name: VersionedPart(row.version, row.sha256) for row in rows} for rows in sides)
        for change in parts_apart(before, after):
            sign = {"added": "+", "removed": "-"}.get(change.verdict, "~")
            found[f"{kind} {change.name}"] = f"{sign} {kind} {change.name}: {part_row(change)[2]}"
    return found


def mix_values(kind: str, good: Mapping[str, T], bad: Mapping[str, T], chosen: Collection[str]) -> dict[str, T]:
    """The good values in their order, with the bad ones in the place of those that are chosen."""
    found = {name: (bad if f"{kind} {name}" in chosen else good).get(name) for name in [*good, *bad]}
    return {name: value for name, value in found.items() if value is not None}


def mix_rows(kind: str, good: Sequence[F], bad: Sequence[F], chosen: Collection[str]) -> list[F]:
    mixed = mix_values(kind, {row.name: row for row in good}, {row.name: row for row in bad}, chosen)
    return [mixed[name] for name in sorted(mixed)]


def lock_file(release: Release) -> str:
    return f"pins/stacks/{release.stack}.lock"


def lock_of(paths: Paths, release: Release) -> StackLock:
    """IntegrityError where the release lacks any file that it was made from."""
    with project_of(paths, release) as project:
        return manifests.read_lock(StackLock, project, release.stack)


def parts_of(release: Release) -> dict[str, dict[str, str]]:
    """The files of a release with their hashes, by the change that they make together: a mod's, or a recipe's with the
    pins of its models, whose commits it names."""
    parts = dict[str, dict[str, str]]()
    for path, sha256 in release.inputs.items():
        part = f"file {path}"
        if path.startswith("mods/"):
            part = f"mod {path.split('/')[1]}"
        elif path.startswith("pins/models/"):
            part = f"file recipes/{release.recipe}.yaml"
        parts.setdefault(part, {})[path] = sha256
    return parts


@dataclass(frozen=True)
class BisectPlan:
    """Two releases, and what turns the good one into the bad one."""

    paths: Paths
    good: Release
    bad: Release
    changes: Changes

    def image_changes(self) -> Changes:
        """What decides the image, as finely as it can be mixed. InputError where this is not all that does, or where
        the two have too little in common; IntegrityError where files of one are not kept."""
        good, bad = self.good, self.bad
        for what in ("stack", "recipe", "stage"):
            if getattr(good, what) != getattr(bad, what):
                raise InputError(f"{what}: got {getattr(good, what)} and {getattr(bad, what)}, expected the same")
        old, new = parts_of(good), parts_of(bad)
        files = {part: f"~ {part}" for part in sorted(old.keys() & new.keys()) if old[part] != new[part]}
        files.pop(f"file {lock_file(good)}", None)  # its packages are changes
        found = files | changed_packages(lock_of(self.paths, good), lock_of(self.paths, bad))
        if (self.key_of(()), self.key_of(found)) != (good.build_key, bad.build_key):
            raise InputError("this sparkpin makes other images of the releases' files")
        for part in files:  # a remark in a manifest, or what only the server's flags follow from, decides no image
            rest = found.keys() - {part}
            if (self.key_of([part]), self.key_of(rest)) == (good.build_key, bad.build_key):
                del found[part]
        return found

    def key_of(self, chosen: Collection[str]) -> str:
        """The build key; "" where these changes do not fit together."""
        with contextlib.suppress(InputError, ManifestError), self.mixed(chosen) as (_, pairings):
            return pairings[-1].rendered.key
        return ""

    @contextlib.contextmanager
    def mixed(self, chosen: Collection[str]) -> Iterator[tuple[Path, tuple[Pairing, ...]]]:
        """A folder with the good files and the chosen changes made to them, and the chain of images that it makes.
        ManifestError and the like where it makes none."""
        old, new = parts_of(self.good), parts_of(self.bad)
        parts = new | old | {part: new[part] for part in new.keys() & {*chosen}}
        inputs = {path: sha256 for files in parts.values() for path, sha256 in files.items()}
        executable = inputs.keys() & {*self.good.executable, *self.bad.executable}
        with project_of(self.paths, replace(self.good, inputs=inputs, executable=tuple(executable))) as project:
            (project / lock_file(self.good)).write_text(manifests.lock_text(self.mixed_lock(project, chosen)))
            yield project, pair(project, self.good.recipe, stage=self.good.stage)

    def mixed_lock(self, project: Path, chosen: Collection[str]) -> StackLock:
        """For the pin of that project. The time of a lock only says when Debian's archive had its packages."""
        lock, other = (lock_of(self.paths, release) for release in (self.good, self.bad))
        debs = mix_rows("deb", lock.debs, other.debs, chosen)
        return StackLock(
            stack=lock.stack,
            inputs=manifests.stack_inputs(manifests.load_stack(project, lock.stack)),
            time=(lock if debs == lock.debs else other).time,
            debs=debs,
            wheels=mix_rows("wheel", lock.wheels, other.wheels, chosen),
        )

    def combine(self, chosen: Collection[str]) -> Release:
        """The good release with the chosen changes. It has no record; its tag names its image in the engine.

        No engine is asked where the image is one of the two that are there.
        """
        if len(chosen) in (0, len(self.changes)):
            return self.bad if chosen else self.good
        there = {of_image(self.changes): self.bad, of_image(()): self.good}
        base = there.get(of_image(chosen)) or self.build(of_image(chosen))
        checkpoint = (self.bad if CHECKPOINT in chosen else self.good).checkpoint_key
        flags = mix_values("flag", flag_words(self.good.argv), flag_words(self.bad.argv), chosen)
        argv = tuple(word for words in flags.values() for word in shlex.split(words))
        env = mix_values("variable", self.good.env, self.bad.env, chosen)
        key = release_key(base.build_key, checkpoint, argv, env)
        release = replace(base, key=key, checkpoint_key=checkpoint, argv=argv, env=env)
        return replace(release, smoke=None, state="built")

    def build(self, chosen: Collection[str]) -> Release:
        """The good release with an image that is neither's."""
        with self.mixed(chosen) as (project, pairings):
            side = replace(self.paths, project=project)
            with at_work(side) as engine:
                fetch_missing(side, engine, pairings)
                built = build_images(side, engine, pairings)[-1]
        image = pairings[-1].rendered
        release = replace(self.good, tag=image.ref, build_key=image.key, size=built.size)
        return replace(release, image=built.config_digest, diff_ids=built.diff_ids)


def make_plan(paths: Paths, good_name: str, bad_name: str) -> BisectPlan:
    """InputError for two without a difference that can be tried; IntegrityError for a record of something else than
    was built."""
    good, bad = (Releases(paths).get(name) for name in (good_name, bad_name))
    for release in (good, bad):
        require_consistent(paths, release)
    plan = BisectPlan(paths, good, bad, changed_starts(good, bad))
    if good.build_key != bad.build_key:
        try:
            plan.changes.update(plan.image_changes())
        except SparkpinError as error:
            plan.changes[IMAGE] = f"~ {IMAGE}, which cannot be mixed: {reason(error)}"
    if not plan.changes:
        cause = f"{good.tag} and {bad.tag} differ in nothing that can be tried by itself"
        raise InputError(cause, next_step=f"invoke diff {good.tag} {bad.tag}")
    return plan
