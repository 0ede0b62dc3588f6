"""How far a start-up is, read off the server's log. Pure, but for the file that keeps what the last start took."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparkpin.core import files
from sparkpin.pins import weight_loaders
from sparkpin.pins.vllm_command import flag_value
from sparkpin.releases.record import Release

STAGES = ("start", "weights", "compile", "cache", "graphs", "ready")
MARKS = (  # what vLLM 0.20 to 0.33 writes as a stage begins
    ("weights", r"Starting to load model|Loading safetensors|Loading weights with"),
    ("compile", r"Dynamo bytecode transform|torch\.compile (?:cache|takes)|Compiling a graph|Loading weights took"),
    ("cache", r"Available KV cache memory|KV cache size: [\d,]+ tokens"),
    ("graphs", r"Capturing CUDA graph"),
    ("ready", r"Application startup complete"),
)
PERCENT = {  # progress bars of vLLM: of the checkpoint's files, of the graphs
    "weights": r"(\d+)% Completed \| (\d+)/(\d+)",
    "graphs": r"Capturing CUDA graphs?[^\r\n]*?(\d+)%[^\r\n]*?(\d+)/(\d+)",
}
FILE = "start.json"


@dataclass
class Startup:
    """Told all of the log, again and again. began: stage -> seconds since the start."""

    began: dict[str, float] = field(default_factory=lambda: {"start": 0.0})
    percent: int | None = None
    done: str = ""
    read: int = 0

    @property
    def stage(self) -> str:
        return max(self.began, key=STAGES.index)

    @property
    def text(self) -> str:
        """Such as "weights 67 % (2 of 3)"."""
        return f"{self.stage} {self.percent} %{self.done}" if self.percent is not None else self.stage

    def update(self, log: bytes, seconds: float) -> bool:
        """Whether stage or percent changed. A line that is not complete counts: a progress bar rewrites its own."""
        before = self.stage, self.percent
        text = log[self.read :].decode(errors="replace")
        self.read = max(self.read, log.rfind(b"\n") + 1)
        for stage, pattern in MARKS:
            if STAGES.index(stage) > STAGES.index(self.stage) and re.search(pattern, text):
                self.began[stage] = round(seconds, 1)
                self.percent, self.done = None, ""
        if (pattern := PERCENT.get(self.stage, "")) and (seen := list(re.finditer(pattern, text))):
            share, count, total = seen[-1].groups()
            self.percent, self.done = int(share), f" ({count} of {total})"
        return (self.stage, self.percent) != before


@dataclass(frozen=True)
class LastStart:
    """What the last start of a release took on this machine. seconds: until it answered; began: see Startup."""

    seconds: float
    began: dict[str, float]

    @property
    def line(self) -> str:
        return f"the last start took {self.seconds:.0f} s"


def keep(folder: Path, release: Release, startup: Startup, seconds: float, log: bytes) -> None:
    """log: of this start alone. What it says that reading the weights took is kept, None where it says nothing."""
    value = {
        "schema": 1,
        "release": release.tag,
        "seconds": round(seconds, 1),
        "began": startup.began,
        "load_format": flag_value(release.argv, weight_loaders.FLAG) or weight_loaders.DEFAULT,
        "weights_seconds": weight_loaders.seconds(log),
    }
    files.write_json(folder / FILE, value)


def last(folder: Path) -> LastStart | None:
    """Of the release whose folder it is, else the newest of its recipe. None where there is none, or none that can be
    read: it is a hint and nothing more."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        others = sorted(folder.parent.glob(f"*/{FILE}"), key=lambda path: path.stat().st_mtime)
        path = next((path for path in (folder / FILE, *reversed(others)) if path.is_file()), folder / FILE)
        value: Any = json.loads(path.read_text(encoding="utf-8"))
        return LastStart(float(value["seconds"]), {str(k): float(v) for k, v in value["began"].items()})
    return None
