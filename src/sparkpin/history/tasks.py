"""`invoke diff` and `invoke why`. Not in `commands`: they need neither an engine nor what it takes to talk to one."""

from __future__ import annotations

import json

from sparkpin.history import sides
from sparkpin.history import why as finding
from sparkpin.history import words as explain
from sparkpin.paths import Paths
from sparkpin.ui import show


def diff(before: str, after: str, *, all_files: bool, as_json: bool) -> bool:
    """Whether the two differ."""
    found = sides.difference(Paths.from_env(), before, after)
    if as_json:
        show(json.dumps(explain.difference_json(found), indent=2, sort_keys=True))
    else:
        show("\n".join(explain.difference_lines(found, all_files=all_files)))
    return not found.identical


def why(tag: str, path: str, *, as_json: bool) -> None:
    origin = finding.why(Paths.from_env(), tag, path)
    if as_json:
        show(json.dumps(explain.origin_json(origin), indent=2, sort_keys=True))
    else:
        show("\n".join(explain.origin_lines(origin)))
