"""What the mods in an image say about themselves in the server's log (mods/modkit writes the lines)."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparkpin.pins.mods import KERNELS

MARKER = b"SPARKPIN_MOD "
OF_THE_API = frozenset({"guard"})  # at work where requests are answered: of several nodes that is the first
AGREED = "agreed"  # an event of modkit's: each rank of several has said the same of release, mods and switches
OF_KERNELS = ("kernels", "compiled", "checked")  # events that `kernel_faults` judges, but for the last


@dataclass(frozen=True)
class ModReport:
    mod: str
    event: str
    detail: str = ""
    value: Mapping[str, Any] = field(default_factory=dict)  # the whole line


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


def reports(log: bytes) -> tuple[ModReport, ...]:
    """Every report in a log, in order. A line that is marked but not readable is a report of failure."""
    found = []
    for line in log.splitlines():
        _, marker, rest = line.partition(MARKER)
        if marker:
            text = rest.decode(errors="replace")
            try:
                value, _ = json.JSONDecoder().raw_decode(text)
                found.append(ModReport(value["mod"], value["event"], value.get("error", ""), value))
            except (ValueError, KeyError, TypeError):
                found.append(ModReport("?", "failed", f"unreadable line: {text[:120]}"))
    return tuple(found)


def active(reports: Iterable[ModReport]) -> frozenset[str]:
    return frozenset(one.mod for one in reports if one.event == "active")


def faults(reports: Sequence[ModReport], wanted: Collection[str]) -> list[str]:
    """What is wrong: failed, missing or switched off, or active though the stage does not have it."""
    works = active(reports)
    events = {one.mod: one.event for one in reports if one.event not in ("active", *OF_KERNELS)}
    found = [f"mod {one.mod} failed: {one.detail}" for one in reports if one.event == "failed"]
    for mod in sorted(set(wanted) - works):
        if events.get(mod) != "failed":
            found.append(f"mod {mod} is not active ({events.get(mod, 'no line in the log')})")
    found += [f"mod {mod} is active, but this stage does not have it" for mod in sorted(works - set(wanted))]
    return list(dict.fromkeys(found))


def kernel_summaries(reports: Iterable[ModReport]) -> dict[str, str]:
    """Mod -> "8 of 8 kernels from the image", as the last process said it."""
    rows = [(one.mod, one.value) for one in reports if one.event == "kernels"]
    return {mod: f"{row.get('image')} of {row.get('total')} kernels from the image" for mod, row in rows}


def kernel_faults(reports: Sequence[ModReport], wanted: Iterable[str]) -> list[str]:
    """What is wrong: a mod that says nothing, or has a kernel that was not compiled when the image was built."""
    found = []
    for one in reports:
        total, compiled = one.value.get("total"), one.value.get("compiled") or ()
        if one.event == "kernels" and (not total or one.value.get("image") != total):
            names = ", ".join(dict.fromkeys(map(str, compiled))) or "none"
            found.append(f"mod {one.mod}: {kernel_summaries([one])[one.mod]}; compiled now: {names}")
        elif one.event == "compiled":
            found.append(f"mod {one.mod}: kernel {one.value.get('kernel')} was compiled after the start")
    silent = sorted(set(wanted) - kernel_summaries(reports).keys())
    return [*dict.fromkeys(found), *(f"mod {mod} does not say where its kernels came from" for mod in silent)]
