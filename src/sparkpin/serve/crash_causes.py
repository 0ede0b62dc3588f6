"""What a server's last words mean, and what mends it: the entries of crash_causes.yaml."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from sparkpin.pins.reading import read_yaml


@dataclass(frozen=True)
class Cause:
    pattern: str
    what: str
    mend: str
    is_last: bool = False


CAUSES = tuple(Cause(**row) for row in read_yaml(Path(__file__).with_name("crash_causes.yaml")))


def cause_of(text: str, *, has_error: bool) -> Cause | None:
    """has_error: whether an error is known that is more than a consequence."""
    found = (cause for cause in CAUSES if re.search(cause.pattern, text))
    return next((cause for cause in found if not (cause.is_last and has_error)), None)
