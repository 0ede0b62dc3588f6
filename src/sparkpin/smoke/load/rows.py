"""What the load told, line by line, and what that comes to."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from sparkpin.core.terminal import printable
from sparkpin.smoke import mods
from sparkpin.smoke.load.inside import MARKER

DONE = {"library": "loaded", "import": "imported", "plugin": "registered", "platform": "found"}
STATES = ("begin", "ok", "refused", "unfit", "failed")
MAY_REFUSE = ("plugin", "platform")  # a library or an import that wants a GPU for itself does not load


@dataclass(frozen=True)
class LoadRow:
    kind: str  # import, library, platform, plugin, end
    name: str
    # One of STATES. "refused": for want of a GPU. "unfit": one of several libraries, of which another is this CPU's.
    state: str
    detail: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return self.state in ("ok", "unfit") or (self.state == "refused" and self.kind in MAY_REFUSE)

    @property
    def label(self) -> str:
        """ "library vllm/_C.abi3.so" """
        return f"{self.kind} {self.name.rpartition('-packages/')[2]}"

    @property
    def word(self) -> str:
        return DONE.get(self.kind, "ok") if self.state == "ok" else self.state

    @property
    def told(self) -> str:
        return f"{self.word}{f', {self.detail}' if self.detail else ''}"


def read_rows(log: bytes) -> list[LoadRow]:
    """Of whole lines; what else stands in the log, and what is not what `inside` writes, is passed over."""
    found = []
    for line in log[: log.rfind(b"\n") + 1].splitlines():
        _, marker, rest = line.partition(MARKER.encode())
        if marker and (row := row_of(rest)):
            found.append(row)
    return found


def row_of(text: bytes) -> LoadRow | None:
    """The image wrote it: nothing that a terminal would obey gets through."""
    try:
        value = json.loads(text)
        kind, state, seconds = value["kind"], value["state"], float(value.get("seconds", 0))
        name, detail = printable(value["name"]), printable(value.get("detail", ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return LoadRow(kind, name, state, detail, seconds) if kind in (*DONE, "end") and state in STATES else None


def outcomes(log: bytes, libraries: Sequence[str], wanted: Iterable[str], ending: str) -> tuple[LoadRow, ...]:
    """One row for each step, in order. libraries, wanted: those that must load, and mods that must register.

    ending: how the process ended, in words, for a step that never ended or was not reached.
    """
    rows = read_rows(log)
    done = [row for row in rows if row.state != "begin"]
    if rows and rows[-1].state == "begin":
        done.append(LoadRow(rows[-1].kind, rows[-1].name, "failed", f"the process {ending}"))
    elif not any(row.kind == "end" for row in done):
        done.append(LoadRow("run", "load", "failed", f"the process {ending}"))
    return (*judged(done, mods.reports(log)), *lacking(done, libraries, wanted))


def judged(done: Iterable[LoadRow], reports: Sequence[mods.ModReport]) -> Iterator[LoadRow]:
    off = {report.mod for report in reports if report.event == "off"}
    fit = {family(row.name) for row in done if row.kind == "library" and row.state == "ok"}
    for row in done:
        if row.state == "unfit" and (row.kind != "library" or family(row.name) not in fit):
            row = dataclasses.replace(row, state="failed")
        if row.kind == "plugin" and row.state == "ok" and row.name in off:
            yield LoadRow("plugin", row.name, "failed", "is switched off by the release's environment", row.seconds)
        elif row.kind != "end":
            yield row


def family(library: str) -> str:
    """The same for libraries of which vLLM takes the one for the CPU: _C, _C_AVX2, _C_AVX512."""
    return re.sub(r"_AVX[0-9A-Z_]*(?=\.[^/]*$)", "", library)


def lacking(done: Sequence[LoadRow], libraries: Sequence[str], wanted: Iterable[str]) -> Iterator[LoadRow]:
    for kind, names in (("library", libraries), ("plugin", sorted(wanted))):
        seen = {row.name for row in done if row.kind == kind}
        is_whole = any(row.kind == "end" for row in done)
        why = "no entry point of the image names it" if is_whole and kind == "plugin" else "not reached"
        yield from (LoadRow(kind, name, "failed", why) for name in names if name not in seen)
