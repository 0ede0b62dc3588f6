"""Which of two versions is the later one: Debian's order, as dpkg has it, and Python's (PEP 440)."""

from __future__ import annotations

import subprocess
from typing import Literal

from packaging.version import InvalidVersion, Version

Direction = Literal["up", "down", "same", "unordered"]


def direction(kind: str, before: str, after: str) -> Direction:
    """From one version to another. kind: "deb", else Python's order; "unordered" where that does not know a version.

    "same" says that they count as one, though they may be written otherwise (1.0 and 1.0.0).
    """
    if kind == "deb":
        if is_debian(before, "lt", after):
            return "up"
        return "down" if is_debian(before, "gt", after) else "same" if before == after else "unordered"
    try:
        was, now = Version(before), Version(after)
    except InvalidVersion:
        return "same" if before == after else "unordered"
    return "up" if was < now else "down" if now < was else "same"


def is_debian(one: str, relation: str, other: str) -> bool:
    """False for what dpkg does not take, and without dpkg. A stranger's version must be no option of it."""
    if not (one[:1].isalnum() and other[:1].isalnum()):
        return False
    try:
        command = ["dpkg", "--compare-versions", one, relation, other]
        return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0
    except FileNotFoundError:
        return False
