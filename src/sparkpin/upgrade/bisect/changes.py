"""The differences of two releases as changes that can be made one by one. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sparkpin.history.diff import Difference, PartChange, flag_words

Kind = Literal["flag", "variable", "checkpoint", "mod", "wheel", "deb", "file", "stage", "image"]
STARTED: tuple[Kind, ...] = ("flag", "variable", "checkpoint")
"""What needs another start, and no other image. Those come first: they are the cheapest to try."""
ORDER: tuple[Kind, ...] = (*STARTED, "mod", "stage", "file", "wheel", "deb", "image")
COMMAND = "command"  # the words before the first flag


@dataclass(frozen=True)
class ReleaseChange:
    """One thing that is otherwise in the bad release. before, after: its value there; None where it is not there."""

    kind: Kind
    name: str
    before: str | None
    after: str | None

    @property
    def id(self) -> str:
        return f"{self.kind} {self.name}"

    @property
    def text(self) -> str:
        if self.before is None:
            return f"+ {self.id} {self.after}".rstrip()
        if self.after is None:
            return f"- {self.id} {self.before}".rstrip()
        return f"~ {self.id}: {self.before or '(empty)'} -> {self.after or '(empty)'}"


def of_command(found: Difference) -> Iterator[ReleaseChange]:
    """Flags and variables: how it is served."""
    for change in found.flags:
        before, after = (value_of(change.name, value) for value in (change.before, change.after))
        yield ReleaseChange("flag", change.name, before, after)
    for change in found.env:
        yield ReleaseChange("variable", change.name, change.before, change.after)


def value_of(name: str, words: str | None) -> str | None:
    """Without the flag itself, which `name` says, where it is spelled as there."""
    if words is None or name == COMMAND:
        return words
    return words.removeprefix(name).strip() if words.partition(" ")[0] == name else words


def of_parts(kind: Kind, changes: Sequence[PartChange]) -> Iterator[ReleaseChange]:
    for change in changes:
        parts = (change.before, change.after)
        alike = len({part.version if part else None for part in parts}) == 1  # their content alone is another
        texts = [(f"{one.version} ({one.sha256[:12]})" if alike else one.version) if one else None for one in parts]
        yield ReleaseChange(kind, change.name, *texts)


def groups_of(changes: Sequence[ReleaseChange]) -> list[list[ReleaseChange]]:
    """Those of a kind together, the cheap ones first."""
    return [[change for change in changes if change.kind == kind] for kind in ORDER]


def argv_with(good: Sequence[str], bad: Sequence[str], chosen: Collection[str]) -> tuple[str, ...]:
    """The good command with the flags of the bad one that are chosen by their names, in the good one's order."""
    kept = mixed(flag_words(good), flag_words(bad), chosen)
    return tuple(word for words in kept.values() for word in shlex.split(words))


def mixed(good: Mapping[str, str], bad: Mapping[str, str], chosen: Collection[str]) -> dict[str, str]:
    """The good values, with what the bad ones have in the place of those that are chosen by their names."""
    kept = {name: (bad if name in chosen else good).get(name) for name in [*good, *bad]}
    return {name: value for name, value in kept.items() if value is not None}
