"""What `inside` printed, line by line, and what a rule makes of it."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from typing import Any, Literal

from packaging.utils import canonicalize_name

from sparkpin.smoke import mods
from sparkpin.smoke.inspect.inside import MARKER

Severity = Literal["error", "warning", "note", "allowed"]
ORDER: tuple[Severity, ...] = ("error", "warning", "note", "allowed")
RULES = (
    *("run", "torch", "packages", "plugins", "cuda", "files", "gpu", "kernels", "needed", "versions", "symbols"),
    *("load", "import", "platform", "fact"),
)
DONE = {"library": "loaded", "import": "imported", "plugin": "registered"}  # words for "ok"


@dataclass(frozen=True)
class Step:
    kind: str  # fact, library, import, platform, plugin, end
    name: str
    # begin, ok, failed; refused: for want of a GPU; of a library also unfit (instructions of another CPU), crashed,
    # and foreign (for another machine, not loaded)
    state: str
    detail: Any = ""  # what it found, or the cause
    seconds: float = 0.0

    @property
    def text(self) -> str:
        """ "library vllm/_C.abi3.so: loaded in 0.3 s" """
        name = self.name.rpartition("-packages/")[2]
        word = DONE.get(self.kind, "found") if self.state == "ok" else self.state
        detail = f", {self.detail}" if isinstance(self.detail, str) and self.detail else ""
        return f"{self.kind} {name}: {word} in {self.seconds:.1f} s{detail}"


@dataclass(frozen=True)
class ImageFacts:
    """ending: how the process ended, in words; off: mods that said that they are switched off."""

    steps: tuple[Step, ...]
    ending: str = ""
    off: tuple[str, ...] = ()

    @classmethod
    def read(cls, log: bytes, ending: str) -> ImageFacts:
        last = next((line for line in reversed(log.splitlines()) if line.strip() and MARKER.encode() not in line), b"")
        ending += f" ({last.decode(errors='replace').strip()})" if last else ""
        off = {report.mod for report in mods.reports(log) if report.event == "off"}
        return cls(read_steps(log), ending, tuple(sorted(off)))

    def fact(self, name: str) -> Any:
        """The value of a step of kind "fact"; None where that failed, or was not reached."""
        return next((row.detail for row in self.of("fact") if row.name == name and row.state == "ok"), None)

    def of(self, kind: str) -> list[Step]:
        """The steps of a kind that ended."""
        return [row for row in self.steps if row.kind == kind and row.state != "begin"]

    @property
    def packages(self) -> list[dict[str, Any]]:
        """Each with its normalised name, version, site, and kernels (mods that it can compile kernels of)."""
        return [one | {"name": canonicalize_name(one["name"] or "")} for one in self.fact("packages") or ()]

    def version(self, name: str) -> str:
        """Of a distribution; "" where the image does not have it."""
        return next((str(one["version"]) for one in self.packages if one["name"] == name), "")


def read_steps(log: bytes) -> tuple[Step, ...]:
    """Of whole lines; what else stands in the log is passed over."""
    found = []
    for line in log[: log.rfind(b"\n") + 1].splitlines():
        _, marker, rest = line.partition(MARKER.encode())
        with contextlib.suppress(ValueError, TypeError):  # Docker splits long lines, and others write between
            found += [Step(**json.loads(rest))] if marker else []
    return tuple(found)


@dataclass(frozen=True)
class ImageFinding:
    severity: Severity
    rule: str  # one of RULES
    subject: str  # path or package
    text: str
    next_step: str = ""
    what: str = ""  # what exactly the rule means (a library, a symbol); empty where the subject says all
    why: str = ""  # it is allowed
