"""The files that two releases were made from, mixed in a temporary folder: the user's tree is never touched.

A file that only one release has is always there: what no manifest names has no effect.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sparkpin.build.pair import Pairing, pair
from sparkpin.core.errors import InputError, ManifestError
from sparkpin.core.paths import Paths
from sparkpin.history.diff import Difference
from sparkpin.pins import manifests
from sparkpin.releases.kept_inputs import KeptInputs
from sparkpin.releases.record import Release
from sparkpin.upgrade.bisect.changes import ReleaseChange, changes_of_parts, names_of

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
        for what in ("stack", "recipe"):
            if getattr(good, what) != getattr(bad, what):
                raise InputError(f"they are of another {what}: {getattr(good, what)} and {getattr(bad, what)}")
        inputs = KeptInputs.of(paths)
        files = [
            {path: inputs.read(sha256, f"{one.tag}: {path}") for path, sha256 in one.inputs.items()}
            for one in (good, bad)
        ]
        return cls(good, bad, *files)

    @property
    def lock(self) -> str:
        return f"pins/stacks/{self.good.stack}.lock"

    def changes(self, found: Difference) -> list[ReleaseChange]:
        """What decides the image, as finely as it can be mixed. InputError where this is not all that does."""
        parts = [*changes_of_parts("mod", [change for change in found.mods if change.before and change.after])]
        parts += [*changes_of_parts("wheel", found.wheels), *changes_of_parts("deb", found.debs)]
        if self.good.stage != self.bad.stage:
            parts.insert(0, ReleaseChange("stage", "of the recipe", self.good.stage, self.bad.stage))
        paths = [path for path in sorted(self.old.keys() & self.new.keys()) if self.old[path] != self.new[path]]
        paths = [path for path in paths if path != self.lock and not path.startswith(APART)]
        files = [ReleaseChange("file", path, "good", "bad") for path in paths]
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
        stage = self.bad.stage if names_of(chosen, "stage") else self.good.stage
        executable = {*self.good.executable, *self.bad.executable}
        with tempfile.TemporaryDirectory(prefix="sparkpin-bisect-") as folder:
            project = Path(folder)
            for path in self.old.keys() | self.new.keys():
                if (content := self.side(path, chosen).get(path)) is not None:
                    target = project / path
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(content)
                    target.chmod(0o755 if path in executable else 0o644)
            self.write_lock(project, chosen)
            yield project, pair(project, self.good.recipe, stage=stage)

    def side(self, path: str, chosen: Collection[ReleaseChange]) -> Mapping[str, bytes]:
        """Which files a path is taken from. A recipe names commits of the models' pins; a mod is taken as a whole."""
        name, known = path, path in self.old
        if path.startswith(MODELS):
            name, known = f"recipes/{self.good.recipe}.yaml", True
        elif path.startswith("mods/"):
            name = path.split("/")[1]
            known = any(other.startswith(f"mods/{name}/") for other in self.old)
        return self.old if known and name not in names_of(chosen, "file") | names_of(chosen, "mod") else self.new

    def write_lock(self, project: Path, chosen: Collection[ReleaseChange]) -> None:
        """The lock in the folder with the chosen packages, for the pin that lies beside it. The time of a lock only
        says when Debian's archive had its packages, and is no change of its own."""
        lock, other = json.loads(self.old[self.lock]), json.loads(self.new[self.lock])
        for kind, key in (("wheel", "wheels"), ("deb", "debs")):
            names = names_of(chosen, kind)
            rows = {row["name"]: row for row in lock[key] if row["name"] not in names}
            rows |= {row["name"]: row for row in other[key] if row["name"] in names}
            lock[key] = [rows[name] for name in sorted(rows)]
        if names_of(chosen, "deb") and "time" in other:
            lock["time"] = other["time"]
        lock["inputs"] = manifests.stack_inputs(manifests.load_stack(project, self.good.stack))
        (project / self.lock).write_text(json.dumps(lock))
