"""A mistake in a recipe, or what may become one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

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
        return f"{self.severity}: {self.key}: {self.text}" + (f"; {self.hint}" if self.hint else "")


error, warning, note = (partial(RecipeFinding, severity, "command") for severity in ORDER)
"""Of the command, which most findings are about."""


def ordered(findings: list[RecipeFinding]) -> list[RecipeFinding]:
    """Errors first, each once."""
    return sorted(dict.fromkeys(findings), key=lambda finding: ORDER.index(finding.severity))
