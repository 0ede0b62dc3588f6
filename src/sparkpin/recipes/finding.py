"""A mistake in a recipe, or what may become one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from sparkpin.core.errors import clipped

LONGEST = 1000  # characters of each part that is shown; the names of all parsers take 600
Severity = Literal["error", "warning", "note"]
ORDER: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True)
class RecipeFinding:
    """error: it does not start, or not as it is meant; warning: it has broken for others, or does something else than
    it seems; note: worth knowing."""

    severity: Severity
    key: str  # of the file
    text: str
    hint: str = ""  # what mends it

    def __str__(self) -> str:
        key, text, hint = (clipped(part, LONGEST) for part in (self.key, self.text, self.hint))
        return f"{self.severity}: {key}: {text}" + (f"; {hint}" if hint else "")


error, warning, note = (partial(RecipeFinding, severity, "command") for severity in ORDER)
"""Of the command, which most findings are about."""


def ordered(findings: list[RecipeFinding]) -> list[RecipeFinding]:
    """Errors first, each once."""
    return sorted(dict.fromkeys(findings), key=lambda finding: ORDER.index(finding.severity))
