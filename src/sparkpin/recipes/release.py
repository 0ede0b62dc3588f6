"""What a release of vLLM takes: the data that benchmarks/wheelflags.py read from its wheel."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from sparkpin.core.names import did_you_mean

DATA = Path(__file__).parent / "vllm"


@dataclass(frozen=True)
class VllmRelease:
    version: str
    wanted: str  # the version asked for, where it has no data
    flags: Mapping[str, Mapping[str, Any]]  # name with `--` -> kind, values, other names
    names: Mapping[str, str]
    tool_parsers: Sequence[str]
    reasoning_parsers: Sequence[str]
    speculative_methods: Sequence[str]
    speculative_keys: Sequence[str]
    environment: Collection[str]

    def flag(self, name: str) -> str | None:
        """The flag that a name on the command line means: aliases, `_` for `-`, a part after a dot, `--no-`, and
        abbreviations that fit one flag alone, as argparse takes them."""
        plain = name.partition("=")[0]
        if plain.startswith("--"):
            head, dot, _ = plain.partition(".")
            plain = head.replace("_", "-")
            if plain in self.names:
                known = self.names[plain]
                return known if not dot or self.flags[known]["kind"] == "value" else None
            if plain.startswith("--no-") and self.is_switch(positive := "--" + plain.removeprefix("--no-")):
                return positive
            fitting = {known for other, known in self.names.items() if other.startswith(plain)}
            return fitting.pop() if len(fitting) == 1 else None
        if plain.startswith("-O"):
            return "--optimization-level"
        return self.names.get(plain.partition(".")[0])  # -cc.mode

    def is_switch(self, name: str) -> bool:
        return name in self.flags and self.flags[name]["kind"] == "switch"


def known_versions() -> list[str]:
    return sorted((path.stem for path in DATA.glob("*.json")), key=Version)


def release(version: str) -> VllmRelease:
    """Of that version, else of the newest known one before it, else of the oldest."""
    known = known_versions()
    try:
        before = [one for one in known if Version(one) <= Version(version)]
    except InvalidVersion:
        before = known
    return _loaded(before[-1] if before else known[0], version)


@cache
def _loaded(version: str, wanted: str) -> VllmRelease:
    value = json.loads((DATA / f"{version}.json").read_text(encoding="utf-8"))
    del value["source"]  # the wheel that it was read from
    names = {other: name for name, entry in value["flags"].items() for other in (name, *entry.get("also", ()))}
    return VllmRelease(**value, wanted=wanted, names=names)


def nearest(word: str, known: Iterable[str], cutoff: float = 0.75) -> str:
    """What may have been meant, as the beginning of a hint; "" where nothing is near."""
    return did_you_mean(word, known, cutoff=cutoff if len(word) > 4 else 0.6).rstrip()


def nearest_few(word: str, known: Sequence[str]) -> str:
    """As `nearest`, of what has a handful of names: what may have been meant, however far, else all of them."""
    return nearest(word, known) or did_you_mean(word, known, most=3, cutoff=0.45) or f"it has {', '.join(known)}"
