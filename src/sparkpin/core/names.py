"""Names of stacks, recipes and stages, and of the files that a release is made from."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path

from sparkpin.core.errors import InputError

MACHINES = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}  # platform of an image -> as `uname -m` prints it
LONGEST = 255  # bytes of a name in a folder, on every file system that counts


def platform_of(machine: str) -> str:
    """As an image's, of what `uname -m` prints."""
    return next((name for name, known in MACHINES.items() if known == machine), machine)


def is_plain(path: str) -> bool:
    """Whether a name may be that of a file below the project: it leads nowhere else, and a terminal takes it."""
    parts = path.split("/")
    if not path.isprintable() or "\\" in path or {"", ".", "..", ".git"} & set(parts):
        return False
    return all(len(part.encode()) <= LONGEST for part in parts)


def nearest(word: str, known: Iterable[str], *, most: int = 1, cutoff: float = 0.6) -> list[str]:
    """What may have been meant, the likeliest first; small and capital letters are the same here."""
    lower = {name.lower(): name for name in reversed(list(known))}
    return [lower[found] for found in difflib.get_close_matches(word.lower(), lower, n=most, cutoff=cutoff)]


def did_you_mean(word: str, known: Iterable[str], *, most: int = 1, cutoff: float = 0.6) -> str:
    """The same as the beginning of a hint; "" where nothing is near."""
    found = nearest(word, known, most=most, cutoff=cutoff)
    return f"did you mean {' or '.join(found)}? " if found else ""


def names_in(folder: Path) -> list[str]:
    """Of its YAML files."""
    return sorted(file.stem for file in folder.glob("*.yaml"))


def choose(folder: Path, name: str, what: str) -> Path:
    """The file of a named manifest; an unknown name lists the known ones. A file with another kind of name is none."""
    known = [one for one in names_in(folder) if re.fullmatch(r"[a-z0-9][a-z0-9.-]*", one)]
    if name not in known:
        raise InputError(f"unknown {what} {name!r}", next_step=f"choose one of: {', '.join(known)}")
    return folder / f"{name}.yaml"
