"""Names of stacks, recipes and stages, before anything reads their files. Standard library alone: see preflight."""

from __future__ import annotations

import re
from pathlib import Path

from sparkpin.errors import InputError


def choose(folder: Path, name: str, what: str, suffix: str = ".yaml") -> Path:
    """The file of a named manifest; an unknown name lists the known ones."""
    path = folder / f"{name}{suffix}"
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name) or not path.is_file():
        known = ", ".join(sorted(file.name.removesuffix(suffix) for file in folder.glob(f"*{suffix}")))
        raise InputError(f"unknown {what} {name!r}", next_step=f"choose one of: {known}")
    return path
