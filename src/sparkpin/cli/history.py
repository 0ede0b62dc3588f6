"""`invoke diff` and `invoke why`, which need no engine."""

from __future__ import annotations

from dataclasses import asdict

from sparkpin.core.paths import Paths
from sparkpin.core.terminal import show, show_json
from sparkpin.history.diff_text import difference_json, difference_lines
from sparkpin.history.sides import difference
from sparkpin.history.why import find_origin, origin_lines


def diff(before: str, after: str, *, all_files: bool, as_json: bool) -> bool:
    """Whether the two differ."""
    found = difference(Paths.from_env(), before, after)
    if as_json:
        show_json(difference_json(found))
    else:
        show("\n".join(difference_lines(found, all_files=all_files)))
    return not found.identical


def why(tag: str, path: str, *, as_json: bool) -> None:
    origin = find_origin(Paths.from_env(), tag, path)
    if as_json:
        show_json(asdict(origin))
    else:
        show("\n".join(origin_lines(origin)))
