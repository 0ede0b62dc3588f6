"""What each setup has lost: figures from the rows that were kept, against `bf16` and against the setup before it.

With the sums of each text, from which intervals can be made again; and how far answers of a proof with drafts are from
those without."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from sparkpin.measure.quality import compare, run
from sparkpin.measure.quality.distance import TOP, distance
from sparkpin.measure.quality.run import QualityMeasured

LONG = "+long"
"""Behind the name of a setup: its readings of long texts."""
PROOF = "proof"
"""The kind of readings that are answers of a proof."""


def all_of(rows: Path, setups: Mapping[str, Any]) -> list[dict[str, Any]]:
    known = {folder.name: found for folder in sorted(rows.iterdir()) if (found := run.load(folder))}
    pairs = []
    for name in known:
        setup, end = setups[name.removesuffix(LONG)], LONG if name.endswith(LONG) else ""
        pairs += [(name, other + end) for other in dict.fromkeys((setup.reference, setup.against))]
    return [pair(known, name, other) for name, other in pairs
            if other in known and other != name and kinds(known[name]) == kinds(known[other])]  # fmt: skip


def kinds(found: QualityMeasured) -> set[str]:
    return {one.kind for one in found.readings}


def pair(known: Mapping[str, QualityMeasured], name: str, other: str) -> dict[str, Any]:
    try:
        if kinds(known[name]) == {PROOF}:
            return {"name": name, "against": other, "serial": serial(known[other], known[name])}
        texts = compare.texts(known[other], known[name], TOP)
        skills = compare.skills(known[other], known[name])
        both = zip(known[other].readings, known[name].readings, strict=True)
        sums = [{"text": p.name, "kind": p.kind, **compare.sums_of(p, q, TOP)} for p, q in both]
    except Exception as error:
        return {"name": name, "against": other, "error": f"{type(error).__name__}: {error}"[:400]}
    return dict(to_jsonable_python({"name": name, "against": other, "texts": texts, "skills": skills, "sums": sums}))


def serial(without: QualityMeasured, drafted: QualityMeasured) -> list[float]:
    """Nats, of each answer to a prompt that both were asked."""
    others = {one.name: one.continued for one in without.readings}
    both = [(others[one.name], one.continued) for one in drafted.readings if one.name in others]
    return [round(distance(one, other), 6) for one, other in both]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    from setups import BY_NAME

    print(json.dumps(all_of(Path(sys.argv[1]), BY_NAME)))
