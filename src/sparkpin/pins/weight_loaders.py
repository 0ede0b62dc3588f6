"""What a server's command line and log have of vLLM's loaders (docs/memory.md)."""

from __future__ import annotations

import re

FLAG = "--load-format"
DEFAULT = "auto"
TOOK = re.compile(r"Loading weights took ([\d.]+) seconds")


def seconds(log: bytes) -> float | None:
    """What vLLM's log reports for reading weights, a draft model's included; None where it has no such line."""
    found = [float(match) for match in TOOK.findall(log.decode(errors="replace"))]
    return round(sum(found), 2) if found else None
