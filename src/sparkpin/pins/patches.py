"""Patches of a stack: read and checked against their hashes, and dropped when they have done their service."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sparkpin.core.errors import IntegrityError, ManifestError
from sparkpin.pins.schema import Patch, Stack


def require_patches(project: Path, stack: Stack) -> None:
    """Every patch is there and is what the stack says. ManifestError or IntegrityError."""
    pins = project / f"pins/stacks/{stack.name}.yaml"
    for number, patch in enumerate(stack.patches):
        path = project / patch.file
        if not path.is_file():
            raise ManifestError(pins, f"patches.{number}.file", patch.file, "a file of the project")
        data = path.read_bytes()
        if (sha256 := hashlib.sha256(data).hexdigest()) != patch.sha256:
            raise IntegrityError(
                f"{path}: sha256={sha256}, wanted {patch.sha256}",
                next_step=f"bring the patch back, or, if it was changed on purpose, write patches.{number}.sha256: "
                f"{sha256} into {pins}",
            )
        if "\n+++ " not in f"\n{data.decode(errors='replace')}":
            raise ManifestError(pins, f"patches.{number}.file", patch.file, "a unified diff, as `git diff` writes it")


def require_wanted(stack: Stack, versions: Mapping[str, str], file: str) -> None:
    """No patch fits its own `drop_when`. versions: of all that the images will hold, by distribution."""
    for number, patch in enumerate(stack.patches):
        wanted = Requirement(patch.drop_when)
        seen = versions.get(canonicalize_name(wanted.name))
        key = f"patches.{number}.drop_when"
        if seen is None:
            raise ManifestError(file, key, patch.drop_when, "a condition on a distribution of the images")
        if wanted.specifier.contains(seen, prereleases=True):
            raise ManifestError(
                file,
                key,
                f"{wanted.name} {seen}",
                f"a {wanted.name} for which `{patch.drop_when}` does not hold: there {patch.file} is to be dropped "
                f"({patch.reason}; {patch.upstream})",
                next_step=f"remove patches.{number} from {file} and {patch.file}, or, if it is needed still, correct "
                "drop_when; then the same command again",
            )


def name_of(number: int, patch: Patch) -> str:
    """The file's name in a build: in the order in which patches are applied."""
    return f"{number:03}-{Path(patch.file).name}"
