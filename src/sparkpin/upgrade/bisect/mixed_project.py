"""The files that two releases were made from, mixed in a folder of its own: the user's tree is never touched.

Files of which only one release has some are there in any case: what no manifest names has no effect.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkpin.build.pair import Pairing, pair
from sparkpin.core.errors import InputError
from sparkpin.core.paths import Paths
from sparkpin.history.diff import Difference
from sparkpin.pins import manifests, reading
from sparkpin.releases.kept_inputs import KeptInputs
from sparkpin.releases.record import Release
from sparkpin.upgrade.bisect.changes import ReleaseChange, of_parts

LISTS = {"wheel": "wheels", "deb": "debs"}  # kind of a change -> key of a stack's lock
SERVED = ("serve", "smoke", "quality")
"""Keys of manifests that no image is made from. Those of a recipe are its flags, which are changes of their own."""
MODELS = "pins/models/"
RECIPE = ("stack", "mods")


@dataclass(frozen=True)
class Mixture:
    """Two releases with their kept files."""

    good: Release
    bad: Release
    old: Mapping[str, bytes]  # path -> content, of the good one
    new: Mapping[str, bytes]  # of the bad one

    @classmethod
    def of(cls, paths: Paths, good: Release, bad: Release) -> Mixture:
        """SparkpinError where files of one are not kept; InputError for two that nothing joins."""
        if good.stack != bad.stack or good.recipe != bad.recipe:
            what = "stack" if good.stack != bad.stack else "recipe"
            raise InputError(f"they are of another {what}: {getattr(good, what)} and {getattr(bad, what)}")
        inputs = KeptInputs.of(paths)
        old, new = (
            {path: inputs.read(sha256, f"{one.tag}: {path}") for path, sha256 in one.inputs.items()}
            for one in (good, bad)
        )
        return cls(good, bad, old, new)

    @property
    def lock(self) -> str:
        return f"pins/stacks/{self.good.stack}.lock"

    def changes(self, found: Difference) -> Iterator[ReleaseChange]:
        """What decides the image, as finely as it can be mixed."""
        if self.good.stage != self.bad.stage:
            yield ReleaseChange("stage", "of the recipe", self.good.stage, self.bad.stage)
        edited = {change.name for change in found.mods if change.before and change.after}
        yield from of_parts("mod", [change for change in found.mods if change.name in edited])
        if self.whole_lock():
            yield ReleaseChange("file", self.lock, "good", "bad")
        else:
            yield from of_parts("wheel", found.wheels)
            yield from of_parts("deb", found.debs)
        for path in sorted(self.old.keys() & self.new.keys()):
            if self.old[path] != self.new[path] and self.decides(path):
                yield ReleaseChange("file", path, "good", "bad")

    def decides(self, path: str) -> bool:
        """Whether a file is one that an image is made from, and no change of another kind covers it."""
        kind = path.partition("/")[0]
        if kind == "mods" or path in (self.lock, manifests.FAMILIES) or path.startswith(MODELS):
            return False
        if kind == "dockerfiles" or not path.endswith(".yaml"):
            return True
        plain = [manifest(text) for text in (self.old[path], self.new[path])]
        if kind == "recipes":
            return any(plain[0].get(key) != plain[1].get(key) for key in RECIPE)
        kept = [{key: value for key, value in one.items() if key not in SERVED} for one in plain]
        return kept[0] != kept[1]

    def whole_lock(self) -> bool:
        """Whether a lock says more than lists of packages that stand for themselves."""
        both = [self.old.get(self.lock), self.new.get(self.lock)]
        rest = [
            {k: v for k, v in json.loads(text).items() if k not in ("inputs", *LISTS.values())} for text in both if text
        ]
        return len(rest) == 2 and rest[0] != rest[1]

    @contextlib.contextmanager
    def project(self, chosen: Collection[ReleaseChange]) -> Iterator[Path]:
        """A folder with the good files, and the chosen changes made to them."""
        may_run = {*self.good.executable, *self.bad.executable}
        with tempfile.TemporaryDirectory(prefix="sparkpin-bisect-") as folder:
            project = Path(folder)
            for path in self.old.keys() | self.new.keys():
                if (text := self.side(path, chosen).get(path)) is not None:
                    target = project / path
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(text)
                    target.chmod(0o755 if path in may_run else 0o644)
            self.write_lock(project, chosen)
            yield project

    def side(self, path: str, chosen: Collection[ReleaseChange]) -> Mapping[str, bytes]:
        """The files of which a path is taken, if it is there: pins of models go with the recipe, which names a commit,
        and a mod is taken as a whole."""
        named = {change.name for change in chosen if change.kind in ("file", "mod")}
        if path.startswith(MODELS):
            return self.new if f"recipes/{self.good.recipe}.yaml" in named else self.old
        if path.startswith("mods/"):
            mod = path.split("/")[1]
            known = any(other.split("/")[:2] == ["mods", mod] for other in self.old)
            return self.old if known and mod not in named else self.new
        return self.old if path in self.old and path not in named else self.new

    def write_lock(self, project: Path, chosen: Collection[ReleaseChange]) -> None:
        """The lock in the folder with the chosen packages, made out for the pin that lies beside it."""
        path = project / self.lock
        lock = json.loads(path.read_bytes())
        other = json.loads(self.new[self.lock])
        for kind, key in LISTS.items():
            names = {change.name for change in chosen if change.kind == kind}
            rows = {row["name"]: row for row in lock[key] if row["name"] not in names}
            rows |= {row["name"]: row for row in other[key] if row["name"] in names}
            lock[key] = [rows[name] for name in sorted(rows)]
        lock["inputs"] = manifests.stack_inputs(manifests.load_stack(project, self.good.stack))
        path.write_text(json.dumps(lock))

    @contextlib.contextmanager
    def pairings(self, chosen: Collection[ReleaseChange]) -> Iterator[tuple[Path, tuple[Pairing, ...]]]:
        """The folder, and the chain of images that it makes. ManifestError and the like where it makes none."""
        stage = self.bad.stage if any(change.kind == "stage" for change in chosen) else self.good.stage
        with self.project(chosen) as project:
            yield project, pair(project, self.good.recipe, stage=stage)

    def check(self, changes: Collection[ReleaseChange]) -> None:
        """InputError unless none of the changes make the good image, and all of them the bad one."""
        for release, chosen in ((self.good, ()), (self.bad, changes)):
            with self.pairings(tuple(chosen)) as (_, pairings):
                if pairings[-1].rendered.key != release.build_key:
                    raise InputError(f"this sparkpin makes another image of the files of {release.tag}")


def manifest(text: bytes) -> dict[str, Any]:
    """A manifest's plain data."""
    with tempfile.NamedTemporaryFile(suffix=".yaml") as file:
        file.write(text)
        file.flush()
        value = reading.read_yaml(Path(file.name))
    return value if isinstance(value, dict) else {}
