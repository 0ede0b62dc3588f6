"""Which recipe and release a command is about."""

from __future__ import annotations

import contextlib

from sparkpin.core.errors import ManifestError
from sparkpin.core.paths import Paths
from sparkpin.host import machine
from sparkpin.pins import manifests
from sparkpin.releases.current import require_current
from sparkpin.releases.record import Release, Releases


def choose_known(paths: Paths, recipe: str | None) -> str:
    """For a command about releases: the recipe asked for, else the one whose release became current last, else the
    only one that has releases, else the default one."""
    if recipe:
        return recipe
    records = Releases(paths)
    known, promoted = [name for name in records.recipes() if records.record_files(name)], dict[str, str]()
    for name in known:
        with contextlib.suppress(ManifestError):  # a damaged list of another stops nobody
            if rows := records.promotions(name):
                promoted[name] = rows[-1].time
    if promoted:
        return max(promoted, key=promoted.__getitem__)
    return known[0] if len(known) == 1 else machine.default_recipe(paths.project)


def current_of(paths: Paths, recipe: str | None) -> Release:
    """The current release of a recipe, by default the one that became current last. InputError where there is none."""
    records, name = Releases(paths), choose_known(paths, recipe)
    if not records.record_files(name):
        manifests.load_recipe(paths.project, name)  # an unknown name is another mistake
    return require_current(records, name)
