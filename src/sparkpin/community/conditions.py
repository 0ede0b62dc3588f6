"""`overrides:` of version 2: settings for some machines only. Here they are read for DGX Sparks, as many as
the model is divided over.

Keys of one `when` must all hold; a value is one, a list of some, or a mapping of comparisons. What is not known here
does not hold, as in sparkrun. `config` is compared with what stands before any of them applies.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparkpin.community.recipe import whole
from sparkpin.core.errors import ManifestError

SPARK: dict[str, Any] = {
    "gpus_per_node": 1,
    "platform": "dgx-spark",
    "vendor": "nvidia",
    "accelerator": "gb10",
    "arch": "sm_121",
    "memory_gb": 128,
}
SHAPE = {"tp": "tensor_parallel", "pp": "pipeline_parallel", "dp": "data_parallel"}
ORDER = {"gt": operator.gt, "gte": operator.ge, "lt": operator.lt, "lte": operator.le}


def holding(entries: Any, config: Mapping[str, Any], path: Path) -> list[dict[str, Any]]:
    """The entries that hold on Sparks, in their order: a later one wins."""
    if entries is None:
        return []
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ManifestError(path, "overrides", entries, "a list of mappings with `when`")
    found = []
    for index, entry in enumerate(entries):
        when, key = entry.get("when"), f"overrides.{index}"
        if not isinstance(when, dict) or not when:
            raise ManifestError(path, f"{key}.when", when, "a mapping of conditions")
        for part in ("defaults", "env"):
            if not isinstance(entry.get(part) or {}, dict):
                raise ManifestError(path, f"{key}.{part}", entry[part], "a mapping")
        if holds(when, config):
            found.append(entry)
    return found


def holds(when: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    facts = SPARK | {short: config.get(long, 1) for short, long in SHAPE.items()}
    sizes = [whole(facts[name]) for name in ("tp", "pp")]
    facts["nodes"] = None if None in sizes else math.prod(size or 0 for size in sizes)
    facts |= {"runtime": config.get("runtime"), "runtime_family": config.get("runtime")}
    for name, wanted in when.items():
        if name == "config":
            if not isinstance(wanted, dict) or not all(fits(config.get(key), w, "config") for key, w in wanted.items()):
                return False
        elif name not in facts or not fits(facts[name], wanted, name):
            return False
    return True


def fits(seen: Any, wanted: Any, name: str) -> bool:
    tests = wanted if isinstance(wanted, dict) else {"in": wanted if isinstance(wanted, list) else [wanted]}
    return all(test(str(word), seen, value, name) for word, value in tests.items())


def test(word: str, seen: Any, wanted: Any, name: str) -> bool:
    if seen is None:  # a setting that is absent is known to be another one; a fact that is absent is not known
        return name == "config" and word in ("ne", "not_in")
    if word in ("eq", "in", "ne", "not_in"):
        several = wanted if isinstance(wanted, list) else [wanted]
        same = any(isinstance(seen, bool) == isinstance(one, bool) and plain(seen) == plain(one) for one in several)
        return same == (word in ("eq", "in"))
    a, b = plain(seen), plain(wanted)
    return word in ORDER and isinstance(a, float) and isinstance(b, float) and bool(ORDER[word](a, b))


def plain(value: Any) -> Any:
    """Numbers and text compare by what they say: 1 and "1", GB10 and gb10."""
    if isinstance(value, bool) or value is None:
        return value
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return str(value).strip().lower()
