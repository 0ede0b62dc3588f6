"""A copy of the project, in which newer versions are locked: the user's files are never touched."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from sparkpin.build.pair import Pairing
from sparkpin.core import files
from sparkpin.core.errors import InputError, ManifestError
from sparkpin.core.paths import Paths
from sparkpin.fetch.lock_model import lock_model
from sparkpin.fetch.stack import lock_stack
from sparkpin.fetch.wheels import Newer
from sparkpin.history.diff import VersionedPart, parts_apart
from sparkpin.pins.manifests import load_stack
from sparkpin.pins.schema import UNRESOLVED, LockedFile, ModelPin, Recipe, Stack
from sparkpin.upgrade.bisect.changes import ReleaseChange, changes_of_parts

FOLDERS = ("pins", "stages", "recipes", "dockerfiles", "mods")
What = Literal["all", "vllm", "python", "debian", "model"]


@contextlib.contextmanager
def side_project(paths: Paths) -> Iterator[Paths]:
    """Of the working tree, as it is, and not of a commit: pins that a person has just edited are tried, too."""
    ignore = shutil.ignore_patterns("__pycache__", f"{files.PARTIAL}*")
    with tempfile.TemporaryDirectory(prefix="sparkpin-bump-") as folder:
        with files.disk_errors(Path(folder)):
            for name in filter(lambda name: (paths.project / name).is_dir(), FOLDERS):
                shutil.copytree(paths.project / name, Path(folder, name), ignore=ignore, ignore_dangling_symlinks=True)
        yield dataclasses.replace(paths, project=Path(folder))


def locks_of(stack: Stack, model: ModelPin) -> list[str]:
    """The files that a bump may write: the stack's pins with `to`, and the lock files that a release is made from."""
    models = [model, *filter(None, [model.drafter])]
    stacks = [f"pins/stacks/{stack.name}.{end}" for end in ("yaml", "lock")]
    return [*stacks, *(f"pins/models/{one.name}.lock" for one in models)]


def raise_pin(side: Paths, stack: Stack, to: str) -> Stack:
    """The stack whose file on the side asks for another version of what it pins. to: NAME==VERSION.

    What is edited is the one place of the old text that makes it the stack that is wanted: remarks repeat pins.
    InputError for a name that the stack does not pin.
    """
    rows, file = stack.python.requirements, side.project / f"pins/stacks/{stack.name}.yaml"
    text, name = file.read_text(encoding="utf-8"), to.partition("==")[0]
    wanted = [to if row.partition("==")[0] == name else row for row in rows]
    for row in (row for row in rows if row not in wanted):
        parts = text.split(row)
        for place in range(1, len(parts)):
            file.write_text(row.join(parts[:place]) + to + row.join(parts[place:]), encoding="utf-8")
            with contextlib.suppress(ManifestError):
                made = load_stack(side.project, stack.name)
                if made.python.requirements == wanted:
                    return made
    step = "--to " + " or ".join(f"{row.partition('==')[0]}==VERSION" for row in rows)
    raise InputError(f"--to: got {to!r}, expected what {file.name} pins in another version", next_step=step)


def lock_newer(side: Paths, stack: Stack, moving: list[ModelPin], what: What, hold: int) -> None:
    """Lock what is newer into the side's project. hold: days that a file must have been offered for. Errors: as of
    `lock_stack` and `lock_model`; network."""
    if what != "model":
        before = (datetime.now(UTC) - timedelta(days=hold)).date().isoformat() if hold else ""
        lock_stack(side, stack.name, newer=Newer(what, before))
    for one in moving if what in ("model", "all") else ():
        lock_model(side, one.name, newest=True)


def moving_of(recipe: Recipe, model: ModelPin) -> list[ModelPin]:
    """The model and its drafter, except one whose pin or recipe names commits: nothing is newer than those."""
    both = (model.owner(model.base), recipe.model_revision), (model.drafter, recipe.drafter_revision)
    found = [pin for pin, revision in both if pin and revision == UNRESOLVED]
    return [pin for pin in found if UNRESOLVED in (one.revision for one in pin.repositories.values())]


def fixed_by(stack: Stack, recipe: Recipe, model: ModelPin, moving: list[ModelPin], what: What) -> list[str]:
    """What keeps a newer version out, of that which was asked for."""
    rows = [row for row in stack.python.requirements if "==" in row]
    found = [f"pins/stacks/{stack.name}.yaml: {', '.join(rows)}"] if rows and what not in ("debian", "model") else []
    if what in ("all", "model") and not moving:
        by_pin = recipe.model_revision == UNRESOLVED
        found.append(f"{f'pins/models/{model.name}' if by_pin else f'recipes/{recipe.name}'}.yaml: commits")
    return found


def differences(old: Pairing, new: Pairing) -> list[str]:
    """One line for each package and each repository of a model that is another."""
    locks = (old.stack_lock, new.stack_lock)
    found = [
        *changes_of_parts("wheel", [*parts_apart("wheels", *(parts(lock.wheels) for lock in locks))]),
        *changes_of_parts("deb", [*parts_apart("debs", *(parts(lock.debs) for lock in locks))]),
    ]
    for name, entry in new.model_lock.repositories.items():
        before = old.model_lock.repositories.get(name)
        if before is None or before.revision != entry.revision:
            was = before.revision[:12] if before else None
            found.append(ReleaseChange("checkpoint", entry.repo, was, entry.revision[:12]))
    return [change.text for change in found]


def parts(rows: Sequence[LockedFile]) -> dict[str, VersionedPart]:
    return {row.name: VersionedPart(row.version, row.sha256) for row in rows}


def hashes(project: Path, names: list[str]) -> dict[str, str]:
    """SHA-256 of the files that are there: what a person may edit meanwhile."""
    there = sorted(name for name in {*names} if (project / name).is_file())
    return {name: files.sha256_file(project / name)[0] for name in there}
