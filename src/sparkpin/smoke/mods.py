"""What the mods in an image say about themselves in the server's log (mods/modkit writes the lines)."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MARKER = b"SPARKPIN_MOD "


@dataclass(frozen=True)
class Report:
    mod: str
    event: str
    detail: str = ""


def expected(project: Path, names: Iterable[str]) -> frozenset[str]:
    """Those of the image's mods that vLLM loads and that must therefore report: they have a vLLM entry point.

    A library for other mods and a folder with a run.sh have none.
    """
    found = set()
    for name in names:
        path = project / "mods" / name / "pyproject.toml"
        if path.is_file():
            groups = tomllib.loads(path.read_text(encoding="utf-8")).get("project", {}).get("entry-points", {})
            found |= {name} if any(group.startswith("vllm.") for group in groups) else set()
    return frozenset(found)


def reports(log: bytes) -> tuple[Report, ...]:
    """Every report in a log, in order. A line that is marked but not readable is a report of failure."""
    found = []
    for line in log.splitlines():
        _, marker, rest = line.partition(MARKER)
        if not marker:
            continue
        text = rest.decode(errors="replace")
        try:
            value, _ = json.JSONDecoder().raw_decode(text)
            found.append(Report(value["mod"], value["event"], value.get("error", "")))
        except (ValueError, KeyError, TypeError):
            found.append(Report("?", "failed", f"unreadable line: {text[:120]}"))
    return tuple(found)


def active(seen: Iterable[Report]) -> frozenset[str]:
    return frozenset(report.mod for report in seen if report.event == "active")


def faults(seen: Iterable[Report], wanted: frozenset[str]) -> list[str]:
    """What is wrong: failed, missing or switched off, or active though the stage does not have it."""
    seen = tuple(seen)
    events = {report.mod: report.event for report in seen if report.event != "active"}
    found = [f"mod {r.mod} failed: {r.detail}" for r in dict.fromkeys(seen) if r.event == "failed"]
    for mod in sorted(wanted - active(seen)):
        if events.get(mod) != "failed":
            found.append(f"mod {mod} is not active ({events.get(mod, 'no line in the log')})")
    found += [f"mod {mod} is active, but this stage does not have it" for mod in sorted(active(seen) - wanted)]
    return found
