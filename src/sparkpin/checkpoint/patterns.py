"""Names and patterns: which pattern (fnmatch) a name fits first, and how to say many names in one line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import translate

_BEGIN, _END = re.compile(r"[*?\[]"), re.compile(r"[*?\]]")


class Patterns:
    """Compiled once and asked for more than 100,000 names, so a name that cannot fit must cost next to nothing."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self.patterns = tuple(patterns)
        self._heads = tuple(_BEGIN.split(pattern)[0] for pattern in patterns)
        self._tails = tuple(_END.split(pattern)[-1] for pattern in patterns)
        self._compiled = tuple(re.compile(translate(pattern)) for pattern in patterns)

    def first(self, name: str) -> int | None:
        """The number of the first pattern that the name fits."""
        if not name.startswith(self._heads) or not name.endswith(self._tails):
            return None
        return next((number for number, compiled in enumerate(self._compiled) if compiled.match(name)), None)

    def all(self, name: str) -> list[int]:
        """The numbers of all patterns that the name fits."""
        if not name.startswith(self._heads) or not name.endswith(self._tails):
            return []
        return [number for number, compiled in enumerate(self._compiled) if compiled.match(name)]


def some(names: Sequence[str]) -> str:
    """The first names of a list and how many there are, for a message."""
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
