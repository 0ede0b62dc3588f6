"""What each setup has lost: figures from the rows that were kept, against `bf16` and against the setup before it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from sparkpin.measure.quality import compare, run
from sparkpin.measure.quality.distance import TOP
from sparkpin.measure.quality.run import QualityMeasured

LONG = "+long"
"""Behind the name of a setup: its readings of long texts."""


def all_of(rows: Path, setups: Mapping[str, Any]) -> list[dict[str, Any]]:
    known = {folder.name: found for folder in sorted(rows.iterdir()) if (found := run.load(folder))}
    pairs = []
    for name in known:
        setup, end = setups[name.removesuffix(LONG)], LONG if name.endswith(LONG) else ""
        pairs += [(name, other + end) for other in dict.fromkeys((setup.reference, setup.against))]
    return [pair(known, name, other) for name, other in pairs if other in known and other != name]


def pair(known: Mapping[str, QualityMeasured], name: str, other: str) -> dict[str, Any]:
    try:
        texts = compare.texts(known[other], known[name], TOP)
        skills = compare.skills(known[other], known[name])
    except Exception as error:
        return {"name": name, "against": other, "error": f"{type(error).__name__}: {error}"[:400]}
    return dict(to_jsonable_python({"name": name, "against": other, "texts": texts, "skills": skills}))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    from setups import BY_NAME

    print(json.dumps(all_of(Path(sys.argv[1]), BY_NAME)))
