"""Which recipe and release a command is about."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from sparkpin.core.errors import InputError, ManifestError
from sparkpin.core.paths import Paths
from sparkpin.host import machine
from sparkpin.pins import manifests
from sparkpin.releases.current import require_current
from sparkpin.releases.record import Release, Releases

if TYPE_CHECKING:
    from sparkpin.build.pair import Pairing


def choose_recipe(paths: Paths, recipe: str | None, stack: str | None) -> str:
    """The recipe asked for, else the default one of the stack, else that of this machine's stack. InputError for a
    file: a recipe has a name, which a foreign one gets when it is imported."""
    if recipe and (file := Path(recipe)).is_file():
        own = (paths.project / "recipes" / file.name).is_file()
        step = f"--recipe {file.stem}" if own else f"invoke recipe import {recipe}"
        raise InputError(f"--recipe: got the file {recipe}, expected the name of a recipe", next_step=step)
    return recipe or machine.default_recipe(paths.project, stack)


def choose_known(paths: Paths, recipe: str | None) -> str:
    """For a command about releases: the recipe asked for, else the one whose release became current last, else the
    only one that has releases, else the default one."""
    if recipe:
        return recipe
    records = Releases(paths)
    known = [name for name in records.recipes() if records.record_files(name)]
    promoted = {}
    for name in known:
        with contextlib.suppress(ManifestError):  # a damaged list of another stops nobody
            if rows := records.promotions(name):
                promoted[name] = rows[-1].time
    if promoted:
        return max(promoted, key=promoted.__getitem__)
    return known[0] if len(known) == 1 else machine.default_recipe(paths.project)


def pairings_of(recipe: str | None, stage: str | None, stack: str | None = None) -> tuple[Paths, tuple[Pairing, ...]]:
    from sparkpin.build.pair import pair, require_model_fits  # slow to import, and `rollback` pairs nothing

    paths = Paths.from_env()
    pairings = pair(paths.project, choose_recipe(paths, recipe, stack), stage=stage, stack_name=stack)
    for pairing in pairings:
        require_model_fits(paths, pairing)
    return paths, pairings


def require_recipe(paths: Paths, records: Releases, name: str) -> list[ManifestError]:
    """A recipe whose file is gone is known as long as a release of it is there. InputError for any other.

    What of its records cannot be read, and why.
    """
    known, faults = records.readable(name)
    if not known and not faults:
        manifests.load_recipe(paths.project, name)
    return faults


def current_of(paths: Paths, recipe: str | None) -> Release:
    """The current release of a recipe, by default the one that became current last. InputError where there is none."""
    records, name = Releases(paths), choose_known(paths, recipe)
    if not records.current_tag(name):
        require_recipe(paths, records, name)  # an unknown name is another mistake
    return require_current(records, name)
