"""`invoke diff` and `invoke why`, which need no engine."""

from __future__ import annotations

import json

from sparkpin.core.paths import Paths
from sparkpin.core.terminal import show
from sparkpin.history import operands
from sparkpin.history import text as explain
from sparkpin.history import why as finding


def written(value: object) -> str:
    return json.dumps(value, indent=2, sort_keys=True)


def diff(before: str, after: str, *, all_files: bool, as_json: bool) -> bool:
    """Whether the two differ."""
    found = operands.difference(Paths.from_env(), before, after)
    lines = (
        [written(explain.difference_json(found))] if as_json else explain.difference_lines(found, all_files=all_files)
    )
    show("\n".join(lines))
    return not found.identical


def why(tag: str, path: str, *, as_json: bool) -> None:
    origin = finding.why(Paths.from_env(), tag, path)
    show("\n".join([written(explain.origin_json(origin))] if as_json else explain.origin_lines(origin)))
