"""Which wheel lies in which layer of the images. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from packaging.utils import canonicalize_name

from sparkpin.core.errors import ManifestError
from sparkpin.pins.schema import LockedFile, Stack, StackLock

# layers beside those that the stack names
VENV, USER, LINKS, STACK_MODS = "venv", "user", "links", "stack-mods"
RESERVED = frozenset({VENV, USER, LINKS, STACK_MODS})


def wheel_groups(project: Path, stack: Stack, lock: StackLock) -> dict[str, list[LockedFile]]:
    """The wheels by layer, in the stack's order, without empty layers."""
    file = project / f"pins/stacks/{stack.name}.yaml"
    left = {canonicalize_name(wheel.name): wheel for wheel in lock.wheels}
    groups: dict[str, list[LockedFile]] = {}
    for layer in stack.python.layers:
        if layer.name in RESERVED:
            raise ManifestError(file, "python.layers", layer.name, "a name that no other layer of the images has")
        groups[layer.name] = []
        for package in layer.packages:
            if package == "*":
                continue
            if canonicalize_name(package) not in left:
                raise ManifestError(
                    file, f"python.layers.{layer.name}", package, "a distribution of the lock that no other layer names"
                )
            groups[layer.name].append(left.pop(canonicalize_name(package)))
    rest = next(layer.name for layer in stack.python.layers if layer.packages == ["*"])
    groups[rest] += left.values()
    return {name: by_name(wheels) for name, wheels in groups.items() if wheels}


def by_name(wheels: Sequence[LockedFile]) -> list[LockedFile]:
    return sorted(wheels, key=lambda wheel: canonicalize_name(wheel.name))
