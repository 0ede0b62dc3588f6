"""`invoke diff` and `invoke why`, which need no engine."""

from __future__ import annotations

from typing import Annotated

from sparkpin.cli.options import Json
from sparkpin.cli.tasks import task
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import show, show_json
from sparkpin.history import operands
from sparkpin.history import text as explain
from sparkpin.history import why as finding


@task("releases")
def diff(
    before: Annotated[str, "tag of a release, or . for the working tree", "TAG"],
    after: Annotated[str, "another tag, or .", "TAG"],
    *,
    files: Annotated[bool, "every path of the images that differs"] = False,
    json: Json = False,
    exit_code: Annotated[bool, "end with 1 when they differ"] = False,
) -> int:
    """Print what changed between two releases.

    invoke diff v2 v2-tq
    """
    found = operands.difference(Paths.from_env(), before, after)
    if json:
        show_json(explain.difference_json(found))
    else:
        show("\n".join(explain.difference_lines(found, all_files=files)))
    return int(exit_code and not found.identical)


@task("prove and carry")
def why(tag: Annotated[str, "release"], path: Annotated[str, "in its image"], *, json: Json = False) -> None:
    """Print which lock entry, stage and layer a file comes from."""
    origin = finding.why(Paths.from_env(), tag, path)
    if json:
        show_json(explain.origin_json(origin))
    else:
        show("\n".join(explain.origin_lines(origin)))
