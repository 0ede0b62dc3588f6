"""`invoke diff` and `invoke why`, which need no engine."""

from __future__ import annotations

from sparkpin.core.paths import Paths
from sparkpin.core.terminal import show, show_json
from sparkpin.history import operands
from sparkpin.history import text as explain
from sparkpin.history import why as finding


def diff(before: str, after: str, *, all_files: bool, as_json: bool) -> bool:
    """Whether the two differ."""
    found = operands.difference(Paths.from_env(), before, after)
    if as_json:
        show_json(explain.difference_json(found))
    else:
        show("\n".join(explain.difference_lines(found, all_files=all_files)))
    return not found.identical


def why(tag: str, path: str, *, as_json: bool) -> None:
    origin = finding.why(Paths.from_env(), tag, path)
    if as_json:
        show_json(explain.origin_json(origin))
    else:
        show("\n".join(explain.origin_lines(origin)))
