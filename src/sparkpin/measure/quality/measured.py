"""What was measured of one release, and where that is kept: a chain of stages measures each once.

    SPARKPIN_CACHE/quality/<release key>-<what was asked>/measured.json, rows.npz

A release's key decides its image, and so its vLLM: what one version has answered is never taken for another's.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparkpin.core.files import sha256_file, write_json
from sparkpin.core.paths import Paths
from sparkpin.measure.quality.distance import Rows
from sparkpin.releases.quality_record import KEY_DIGITS
from sparkpin.releases.record import Release
from sparkpin.smoke.evidence import replaced

FORM = 1  # grows when a measurement of before would mean something else
PARTS = ("ids", "logprobs", "tokens", "chosen")


@dataclass(frozen=True)
class Reading:
    """Of one text."""

    name: str
    kind: str
    first: int  # its first token, which no log-probability belongs to
    forced: Rows  # a row for each token after it
    continued: Rows  # a row for each token of the greedy continuation


@dataclass(frozen=True)
class SkillAnswer:
    """To a question with a right answer."""

    skill: str  # "tool calls", or "needles, <n> tokens"
    name: str
    right: bool
    detail: str = ""  # what was wrong


@dataclass(frozen=True)
class QualityMeasured:
    vllm: str  # what the server says it is
    seconds: float  # of measuring, the start of the server aside
    readings: tuple[Reading, ...]
    asked: tuple[SkillAnswer, ...]
    notes: tuple[str, ...] = ()  # what was left out, and why


def place(paths: Paths, release: Release, what: dict[str, Any]) -> Path:
    """The folder of what was asked. what: JSON values that decide the requests."""
    text = json.dumps({"form": FORM} | what, sort_keys=True)
    return paths.cache / "quality" / f"{release.key[:KEY_DIGITS]}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def keep(folder: Path, measured: QualityMeasured) -> None:
    """In the place of what is there: a damaged folder, or what another run found meanwhile."""
    arrays = {
        f"{number}-{which}-{part}": getattr(getattr(reading, which), part)
        for number, reading in enumerate(measured.readings)
        for which in ("forced", "continued")
        for part in PARTS
    }
    with replaced(folder) as partial:
        np.savez_compressed(partial / "rows.npz", **arrays)
        value = {
            "vllm": measured.vllm,
            "seconds": measured.seconds,
            "readings": [[r.name, r.kind, r.first] for r in measured.readings],
            "asked": [asdict(one) for one in measured.asked],
            "notes": list(measured.notes),
            "rows": sha256_file(partial / "rows.npz")[0],
        }
        write_json(partial / "measured.json", value)


def known(folder: Path) -> QualityMeasured | None:
    """None where nothing was kept, or not the bytes that were kept: then it is measured again."""
    try:
        value = json.loads((folder / "measured.json").read_text(encoding="utf-8"))
        if sha256_file(folder / "rows.npz")[0] != value["rows"]:
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    with np.load(folder / "rows.npz") as arrays:
        readings = tuple(
            Reading(
                name,
                kind,
                first,
                *(Rows(*(arrays[f"{number}-{which}-{part}"] for part in PARTS)) for which in ("forced", "continued")),
            )
            for number, (name, kind, first) in enumerate(value["readings"])
        )
    asked = tuple(SkillAnswer(**one) for one in value["asked"])
    return QualityMeasured(value["vllm"], value["seconds"], readings, asked, tuple(value["notes"]))
