"""What a rule says, and what is accepted with a reason."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Severity = Literal["error", "warning", "note", "allowed"]
ORDER: tuple[Severity, ...] = ("error", "warning", "note", "allowed")
RULES = ("torch", "packages", "plugins", "cuda", "files", "gpu", "kernels", "needed", "versions", "symbols")


@dataclass(frozen=True)
class ImageFinding:
    severity: Severity
    rule: str  # one of RULES
    subject: str  # path or package
    text: str
    next_step: str = ""
    what: str = ""  # what exactly the rule means (a library, a symbol); empty where the subject says all
    why: str = ""  # it is allowed


@dataclass(frozen=True)
class Allowed:
    rule: str
    subject: str  # pattern (fnmatch) of paths, with a slash in front
    what: str  # regular expression of the whole symbol or name
    why: str
    package: str = ""  # the entry counts only in images that have this distribution

    def fits(self, rule: str, subject: str, what: str) -> bool:
        is_about = self.rule == rule and fnmatch.fnmatchcase(f"/{subject}", self.subject)
        return is_about and bool(re.fullmatch(self.what, what))


def reason(allowed: Iterable[Allowed], rule: str, subject: str, what: str) -> str:
    """Why something is accepted; "" when it is not."""
    return next((entry.why for entry in allowed if entry.fits(rule, subject, what)), "")


def settle(finding: ImageFinding, allowed: Iterable[Allowed]) -> ImageFinding:
    """A finding as it stands, or as allowed with the reason."""
    why = reason(allowed, finding.rule, finding.subject, finding.what)
    return replace(finding, severity="allowed", why=why, next_step="") if why else finding
