"""Which wheel lies in which layer, and what of that a new lock keeps. Pure.

An engine stores a layer under its own digest and those of all layers below it: when a lower layer changes, every layer
above it is stored again. A lock may therefore keep the layers of the former one as they are, and put what changed into
a layer `updates` above them, which also hides what it replaces.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from sparkpin.core.errors import ManifestError
from sparkpin.pins.schema import LockedFile, Stack, StackLock

# layers beside those that the stack names
VENV, USER, UPDATES, LINKS, STACK_MODS = "venv", "user", "updates", "links", "stack-mods"
SOURCE_WHEELS = "source-wheels"  # what a build from source needs beside them, a tree and no layer
SOURCE_STAGES = (SOURCE_WHEELS, "source-builder", "source-wheel")  # of the Dockerfile
RESERVED = frozenset({VENV, USER, UPDATES, LINKS, STACK_MODS, *SOURCE_STAGES})

Groups = dict[str, list[LockedFile]]


def normal(name: str) -> str:
    """A distribution's normal name (PyPA, "Names and normalization")."""
    return re.sub(r"[-_.]+", "-", name).lower()


def lower_wheels(lock: StackLock) -> list[LockedFile]:
    """What lies in the layers that the stack names: not always what the images have in effect."""
    return [*(wheel for wheel in lock.wheels if wheel.name not in lock.updates), *lock.underlay]


def wheel_groups(project: Path, stack: Stack, lock: StackLock) -> Groups:
    """The lower wheels by layer, in the stack's order, without empty layers."""
    file = project / f"pins/stacks/{stack.name}.yaml"
    left = {normal(wheel.name): wheel for wheel in lower_wheels(lock)}
    above = {normal(name) for name in lock.updates} - left.keys()
    groups: Groups = {}
    built = [stack.python.source.name] if stack.python.source else []
    for layer in stack.python.layers:
        if layer.packages == built:
            continue
        if layer.name in RESERVED:
            raise ManifestError(file, "python.layers", layer.name, "a name that no other layer of the images has")
        groups[layer.name] = []
        for package in layer.packages:
            if package == "*" or normal(package) in above:
                continue
            if normal(package) not in left:
                raise ManifestError(
                    file, f"python.layers.{layer.name}", package, "a distribution of the lock that no other layer names"
                )
            groups[layer.name].append(left.pop(normal(package)))
    rest = next(layer.name for layer in stack.python.layers if layer.packages == ["*"])
    groups[rest] += left.values()
    return {name: by_name(wheels) for name, wheels in groups.items() if wheels}


def updated(lock: StackLock) -> list[LockedFile]:
    """The wheels of the layer `updates`."""
    return by_name([wheel for wheel in lock.wheels if wheel.name in lock.updates])


def by_name(wheels: Sequence[LockedFile]) -> list[LockedFile]:
    return sorted(wheels, key=lambda wheel: normal(wheel.name))


def keep_layers(former: StackLock, flat: StackLock) -> StackLock:
    """The new lock `flat` with the lower layers of the former one; a wheel that is in them again leaves both lists."""
    lower = {wheel.name: wheel for wheel in lower_wheels(former)}
    effective = {wheel.name: wheel for wheel in flat.wheels}
    updates = [name for name, wheel in effective.items() if lower.get(name) != wheel]
    underlay = [wheel for name, wheel in lower.items() if effective.get(name) != wheel]
    return flat.model_copy(update={"updates": sorted(updates), "underlay": sorted(underlay, key=lambda w: w.name)})


def stored_anew(project: Path, stack: Stack, former: StackLock, lock: StackLock) -> Mapping[str, list[LockedFile]]:
    """The layers of wheels that an engine with the former lock's images stores again for the new lock's: the lowest
    that differs and all above it.
    """
    # What fell out of the stack file since is no matter here: it is in the former lock all the same.
    named = {normal(wheel.name) for wheel in lower_wheels(former)}
    layers = [
        layer.model_copy(update={"packages": [p for p in layer.packages if p == "*" or normal(p) in named]})
        for layer in stack.python.layers
    ]
    past = stack.model_copy(update={"python": stack.python.model_copy(update={"layers": layers})})
    before = [*wheel_groups(project, past, former).items(), *top(former)]
    after = [*wheel_groups(project, stack, lock).items(), *top(lock)]
    if [deb.sha256 for deb in former.debs] != [deb.sha256 for deb in lock.debs]:
        return dict(after)
    same = next((n for n, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), len(before))
    return dict(after[same:])


def top(lock: StackLock) -> list[tuple[str, list[LockedFile]]]:
    return [(UPDATES, updated(lock))] if lock.updates or lock.underlay else []
