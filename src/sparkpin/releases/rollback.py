"""Back to what was current before: where a rollback lands. It changes nothing; `current.make_current` does."""

from __future__ import annotations

from collections.abc import Callable

from sparkpin.core.errors import CheckpointError, InputError, IntegrityError, ManifestError, QualityError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say
from sparkpin.host.engine import Engine
from sparkpin.releases import lookup, quality_gate
from sparkpin.releases.current import GoneError, not_passed, require_current, require_parts
from sparkpin.releases.promotions import ways_back
from sparkpin.releases.record import Release, Releases

Check = Callable[[Release], object]
"""Raises where a release is not what its record says: `build.consistent`, which this package cannot import."""
OF_THE_RELEASE = (GoneError, CheckpointError, IntegrityError, InputError, ManifestError, QualityError)
"""It is removed, gone or refused. Anything else may pass, and says nothing about the release: a machine is away."""


def find_target(paths: Paths, engine: Engine, recipe: str, check: Check) -> Release:
    """Where a rollback lands: on what was current last before, or on the one before that where `promote` would refuse
    it, or where image, checkpoint or record are gone. InputError where there is none; what may
    pass, such as an engine that does not answer, is raised."""
    records = Releases(paths)
    current, before = require_current(records, recipe), records.before(recipe)
    known = records.readable(recipe)[0]
    refusals: list[SparkpinError] = []
    named = {release.tag: release for release in known}
    for tag in ways_back(known, current, before):
        if tag not in named:
            say(f"passed over {tag}: its record is gone, or cannot be read")
            continue
        try:
            require_good(paths, engine, named[tag], check)
        except OF_THE_RELEASE as refusal:
            say(f"passed over {tag}: {refusal.message}")
            refusals.append(refusal)
            continue
        if tag not in before:
            say(f"nothing is left that was current before {current.tag}: {tag} passed, and never was current")
        return named[tag]
    if refusals:
        raise next((one for one in refusals if isinstance(one, IntegrityError)), refusals[0])
    raise InputError(
        f"there is no release of {recipe!r} to go back to from {current.tag}",
        next_step="invoke images lists the releases; invoke promote TAG chooses any one that passed",
    )


def require_target(paths: Paths, engine: Engine, recipe: str, to: str, check: Check) -> Release:
    """The release of `--to`: a name (`lookup`) of what was current before, or the current one itself, where the same
    rollback has been done already. InputError for any other; nothing else will do then."""
    records = Releases(paths)
    current, before = require_current(records, recipe), records.before(recipe)
    named = {release.tag: release for release in records.readable(recipe)[0]}
    were = [named[tag] for tag in before if tag in named and tag != current.tag]  # each promotion counts
    if found := lookup.matches(to, were):
        require_good(paths, engine, found[-1], check)
        return found[-1]
    other = records.get(to, recipe)
    if other.tag == current.tag:
        return other
    tags = ", ".join(dict.fromkeys(one.tag for one in reversed(were))) or "none"
    raise InputError(
        f"{other.tag} was not current before {current.tag}; these were, the last first: {tags}",
        next_step=f"invoke promote {other.tag}, which goes anywhere",
    )


def require_good(paths: Paths, engine: Engine, release: Release, check: Check) -> None:
    """Raises what keeps a release from becoming current."""
    if not release.is_good:
        raise not_passed(paths, release)
    require_parts(paths, engine, release)
    quality_gate.check(paths, release, accepted="")
    check(release)
