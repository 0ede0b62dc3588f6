"""A copy of the project, in which newer versions are locked: the user's files are never touched."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from sparkpin.build.pair import Pairing
from sparkpin.core import files
from sparkpin.core.errors import InputError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import Say
from sparkpin.fetch.lock_model import lock_model
from sparkpin.fetch.stack import lock_stack
from sparkpin.fetch.wheels import Newer
from sparkpin.history.diff import VersionedPart, parts_apart
from sparkpin.pins.manifests import load_stack
from sparkpin.pins.schema import UNRESOLVED, LockedFile, ModelPin, Recipe, Stack
from sparkpin.upgrade.bisect.changes import ReleaseChange, of_parts
from sparkpin.upgrade.bump.record import FOLDER

FOLDERS = ("pins", "stages", "recipes", "dockerfiles", "mods")


@contextlib.contextmanager
def side_project(paths: Paths) -> Iterator[Paths]:
    """The caller holds the lock of bumps: what a killed one left is swept."""
    root = paths.home / FOLDER
    with files.disk_errors(root):
        root.mkdir(parents=True, exist_ok=True)
        files.sweep(root)
        with tempfile.TemporaryDirectory(prefix=files.PARTIAL, dir=root) as folder:
            ignore = shutil.ignore_patterns("__pycache__", f"{files.PARTIAL}*")
            for name in filter(lambda name: (paths.project / name).is_dir(), FOLDERS):
                shutil.copytree(paths.project / name, Path(folder, name), ignore=ignore, ignore_dangling_symlinks=True)
            yield dataclasses.replace(paths, project=Path(folder))


def locks_of(stack: Stack, model: ModelPin) -> list[str]:
    """The lock files that a release is made from."""
    models = [model, *filter(None, [model.drafter])]
    return [f"pins/stacks/{stack.name}.lock", *(f"pins/models/{one.name}.lock" for one in models)]


def pinned_to(side: Paths, stack: Stack, to: str) -> Stack:
    """The stack whose file on the side asks for another version of what it pins. to: NAME==VERSION; "" for none.

    InputError for a name that it does not pin.
    """
    file, name = side.project / f"pins/stacks/{stack.name}.yaml", to.partition("==")[0].strip()
    row = next((row for row in stack.python.requirements if to and row.partition("==")[0] == name), "")
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    places = [at for at, line in enumerate(lines) if row and row in line.partition("#")[0]]
    if to and (len(places) != 1 or not re.fullmatch(r"[\w.-]+==[\w.+!]+", to, re.ASCII)):
        wanted = " or ".join(f"{row.partition('==')[0]}==VERSION" for row in stack.python.requirements)
        raise InputError(
            f"--to: got {to!r}, expected what pins/stacks/{stack.name}.yaml pins", next_step=f"--to {wanted}"
        )
    for at in places:
        lines[at] = lines[at].replace(row, to, 1)
    file.write_text("".join(lines), encoding="utf-8")
    return load_stack(side.project, stack.name)


def lock_newer(side: Paths, stack: Stack, moving: list[ModelPin], what: str, hold: int, say: Say) -> None:
    """Lock what is newer into the side's project. hold: days that a file must have been offered for. Errors: as of
    `lock_stack` and `lock_model`; network."""
    if what != "model":
        before = (datetime.now(UTC) - timedelta(days=hold)).date().isoformat() if hold else ""
        lock_stack(side, stack.name, say, newer=Newer(what, before))  # type: ignore[arg-type]
    for one in moving if what in ("model", "all") else ():
        lock_model(side, one.name, say, newest=True)


def moving_of(recipe: Recipe, model: ModelPin) -> list[ModelPin]:
    """The model and its drafter, but for one whose pin or recipe names commits: nothing is newer than those."""
    both = (model.owner(model.base), recipe.model_revision), (model.drafter, recipe.drafter_revision)
    found = [pin for pin, revision in both if pin and revision == UNRESOLVED]
    return [pin for pin in found if UNRESOLVED in (one.revision for one in pin.repositories.values())]


def fixed_by(stack: Stack, recipe: Recipe, model: ModelPin, moving: list[ModelPin], what: str) -> list[str]:
    """What keeps a newer version out, of that which was asked for."""
    rows = [row for row in stack.python.requirements if "==" in row]
    found = [f"pins/stacks/{stack.name}.yaml: {', '.join(rows)}"] if rows and what not in ("debian", "model") else []
    if what in ("all", "model") and not moving:
        by_pin = recipe.model_revision == UNRESOLVED
        found.append(f"{f'pins/models/{model.name}' if by_pin else f'recipes/{recipe.name}'}.yaml: commits")
    return found


def differences(old: Pairing, new: Pairing) -> list[str]:
    """One line for each package and each repository of a model that is another."""
    found: list[str] = []
    for kind, key in (("wheel", "wheels"), ("deb", "debs")):
        sides = [parts(getattr(one.stack_lock, key)) for one in (old, new)]
        found += [change.text for change in of_parts(kind, list(parts_apart(key, *sides)))]  # type: ignore[arg-type]
    for name, entry in new.model_lock.repositories.items():
        before = old.model_lock.repositories.get(name)
        if before is None or before.revision != entry.revision:
            was = before.revision[:12] if before else None
            found.append(ReleaseChange("checkpoint", entry.repo, was, entry.revision[:12]).text)
    return found


def parts(rows: list[LockedFile]) -> dict[str, VersionedPart]:
    return {row.name: VersionedPart(row.version, row.sha256) for row in rows}


def contents(paths: Paths, locks: list[str], new: Pairing) -> dict[str, str]:
    """SHA-256 of what a person may edit meanwhile: the locks that are there, and the files of the new release."""
    names = {name for name in (*locks, *new.inputs) if (paths.project / name).is_file()}
    return {name: files.sha256_file(paths.project / name)[0] for name in sorted(names)}
