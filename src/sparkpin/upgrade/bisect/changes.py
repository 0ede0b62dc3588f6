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


@dataclass(frozen=True)
class ReleaseChange:
    """One thing that differs in the bad release. before, after: its value; None where it does not exist."""

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
    """Flags and variables: how the server is started."""
    for change in found.flags:  # their words begin with the flag's name, unless it was spelled in another way
        before, after = (words and words.removeprefix(change.name).strip() for words in (change.before, change.after))
        yield ReleaseChange("flag", change.name, before, after)
    yield from (ReleaseChange("variable", change.name, change.before, change.after) for change in found.env)


def changes_of_parts(kind: Kind, changes: Sequence[PartChange]) -> Iterator[ReleaseChange]:
    for change in changes:
        parts = (change.before, change.after)
        same_version = len({part.version if part else None for part in parts}) == 1  # only the content differs
        texts = [
            (f"{one.version} ({one.sha256[:12]})" if same_version else one.version) if one else None for one in parts
        ]
        yield ReleaseChange(kind, change.name, *texts)


def groups_of(changes: Sequence[ReleaseChange]) -> list[list[ReleaseChange]]:
    """Those of one kind together, the cheap kinds first."""
    return [[change for change in changes if change.kind == kind] for kind in ORDER]


def names_of(chosen: Collection[ReleaseChange], kind: str) -> set[str]:
    return {change.name for change in chosen if change.kind == kind}


def mix_argv(good: Sequence[str], bad: Sequence[str], chosen: Collection[str]) -> tuple[str, ...]:
    """The good command with those flags of the bad one that are chosen by name, in the good one's order."""
    values = mix_values(flag_words(good), flag_words(bad), chosen)
    return tuple(word for words in values.values() for word in shlex.split(words))


def mix_values(good: Mapping[str, str], bad: Mapping[str, str], chosen: Collection[str]) -> dict[str, str]:
    """The good values, with the bad ones in the place of those that are chosen by name."""
    found = {name: (bad if name in chosen else good).get(name) for name in [*good, *bad]}
    return {name: value for name, value in found.items() if value is not None}
