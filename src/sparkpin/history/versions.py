"""Which of two versions is the later one: Debian's order and Python's (PEP 440)."""

from __future__ import annotations

import re
from typing import Literal

from packaging.version import InvalidVersion, Version

Direction = Literal["up", "down", "same", "unordered"]
DebianKey = tuple[int, tuple[object, ...], tuple[object, ...]]


def direction(kind: str, before: str, after: str) -> Direction:
    """From one version to another. kind: "deb", else Python's order; "unordered" where that does not know a version.

    "same" says that they count as one, though they may be written otherwise (1.0 and 1.0.0).
    """
    if kind == "deb":
        old, new = debian_key(before), debian_key(after)
        return "up" if old < new else "down" if new < old else "same"
    try:
        was, now = Version(before), Version(after)
    except InvalidVersion:
        return "same" if before == after else "unordered"
    return "up" if was < now else "down" if now < was else "same"


def debian_key(version: str) -> DebianKey:
    """Sorts versions as dpkg does (Debian Policy, 5.6.12): [epoch:]upstream[-revision]."""
    epoch, colon, rest = version.partition(":")
    if not colon:
        epoch, rest = "0", version
    upstream, _, revision = rest.rpartition("-") if "-" in rest else (rest, "", "0")
    return int(epoch) if epoch.isdecimal() else 0, part_key(upstream), part_key(revision)


def part_key(part: str) -> tuple[object, ...]:
    """Text and numbers in turn, as the Policy compares them: a tilde before the end, the end before letters, letters
    before all else; a missing number is 0.
    """
    pieces = re.findall(r"(\D*)(\d*)", part)[:-1]  # the last match is the empty one at the end
    key: list[object] = []
    for text, number in pieces:
        key += [(*map(rank, text), 0), int(number or 0)]
    return (*key, (0,), 0)


def rank(character: str) -> int:
    """0 is the end of a text."""
    if character == "~":
        return -1
    return ord(character) if character.isalpha() else ord(character) + 256
