"""What a person may write for a release's tag, and what they may have meant. Pure.

sparkpin/scripted-tiny:v2-tq-9336c90fde17   the tag; `sparkpin/` and the recipe may be left out
scripted-tiny:v2-tq, v2-tq                  the newest release of a stage, which the engine's moving tag names
current                                     the current release

Where several recipes have one, the recipe whose release became current last is meant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sparkpin.core.errors import InputError
from sparkpin.core.names import nearest
from sparkpin.core.tags import OURS

if TYPE_CHECKING:
    from sparkpin.releases.record import Release


def choose(name: str, releases: Sequence[Release], recipe: str | None, default: Callable[[], str]) -> Release:
    """The release that a name stands for. releases: from the oldest to the newest in each recipe, of
    one `recipe` where it is given; default: the recipe that is meant where several have the name. InputError."""
    found = matches(name, releases)
    if not found:
        raise InputError(f"unknown release {name!r}", next_step=meant(name, releases, recipe))
    if len(found) > 1:
        preferred = default()
        found = [release for release in found if release.recipe == preferred] or found
    if len(found) > 1:
        tags = ", ".join(release.tag for release in found)
        raise InputError(f"{name!r} may be of several recipes", next_step=f"choose one of: {tags}")
    return found[0]


def matches(name: str, releases: Sequence[Release]) -> list[Release]:
    recipe, _, tail = name.removeprefix(OURS).rpartition(":")
    among = [release for release in releases if recipe in ("", release.recipe)]
    if exact := [release for release in among if release.name == tail]:
        return exact
    if tail == "current":
        return [release for release in among if release.state == "current"]
    return list({release.recipe: release for release in among if release.stage == tail}.values())


def meant(name: str, releases: Sequence[Release], recipe: str | None) -> str:
    """The next step after an unknown name: the nearest tags, the newest first where it is a wrong stage's."""
    if not releases:
        up = f"invoke up --recipe {recipe}" if recipe else "invoke up"
        return f"{up} (there is no release yet; invoke build makes one without its smoke test)"
    known = {near: release.tag for release in releases for near in (release.stage, release.name)}
    tags = dict.fromkeys(known[near] for near in nearest(name.rpartition(":")[2], reversed(known), most=3))
    guess = f"did you mean {' or '.join(tags)}? " if tags else ""
    return f"{guess}`invoke images` lists them; the end of a tag is enough, and a stage's name means its newest release"
