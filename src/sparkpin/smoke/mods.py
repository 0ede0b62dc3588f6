"""What the mods in an image say about themselves in the server's log (mods/modkit writes the lines)."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparkpin.pins.mods import KERNELS

MARKER = b"SPARKPIN_MOD "
OF_THE_API = frozenset({"guard"})  # at work where requests are answered: of several nodes that is the first
AGREED = "agreed"  # an event of modkit's: each rank of several has said the same of release, mods and switches
OF_KERNELS = ("kernels", "compiled", "checked")  # events that `smoke.kernels` judges, but for the last


@dataclass(frozen=True)
class ModReport:
    mod: str
    event: str
    detail: str = ""


def expected(project: Path, names: Iterable[str]) -> frozenset[str]:
    """Those of the image's mods that vLLM loads and that must therefore report: they have a vLLM entry point.

    A library for other mods has none.
    """
    return frozenset(name for name in names if any(group.startswith("vllm.") for group in groups(project, name)))


def with_kernels(project: Path, names: Iterable[str]) -> frozenset[str]:
    """Those of the image's mods whose kernels are compiled when the image is built, if it is for a GPU."""
    return frozenset(name for name in names if KERNELS in groups(project, name))


def groups(project: Path, name: str) -> frozenset[str]:
    """Groups of the entry points of a mod."""
    path = project / "mods" / name / "pyproject.toml"
    return frozenset(tomllib.loads(path.read_text(encoding="utf-8")).get("project", {}).get("entry-points", {}))


def lines(log: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    """Text and value of every line that a mod wrote, in order; an empty value where the text is not readable."""
    for line in log.splitlines():
        _, marker, rest = line.partition(MARKER)
        if not marker:
            continue
        text = rest.decode(errors="replace")
        try:
            value, _ = json.JSONDecoder().raw_decode(text)
        except ValueError:
            value = None
        yield text, value if isinstance(value, dict) else {}


def reports(log: bytes) -> tuple[ModReport, ...]:
    """Every report in a log, in order. A line that is marked but not readable is a report of failure."""
    found = []
    for text, value in lines(log):
        try:
            found.append(ModReport(value["mod"], value["event"], value.get("error", "")))
        except KeyError:
            found.append(ModReport("?", "failed", f"unreadable line: {text[:120]}"))
    return tuple(found)


def active(seen: Iterable[ModReport]) -> frozenset[str]:
    return frozenset(report.mod for report in seen if report.event == "active")


def faults(seen: Iterable[ModReport], wanted: Collection[str]) -> list[str]:
    """What is wrong: failed, missing or switched off, or active though the stage does not have it."""
    seen = tuple(report for report in seen if report.event not in OF_KERNELS)
    events = {report.mod: report.event for report in seen if report.event != "active"}
    found = [f"mod {r.mod} failed: {r.detail}" for r in dict.fromkeys(seen) if r.event == "failed"]
    for mod in sorted(set(wanted) - active(seen)):
        if events.get(mod) != "failed":
            found.append(f"mod {mod} is not active ({events.get(mod, 'no line in the log')})")
    found += [f"mod {mod} is active, but this stage does not have it" for mod in sorted(active(seen) - set(wanted))]
    return found
