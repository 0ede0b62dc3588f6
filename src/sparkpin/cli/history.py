"""`invoke diff` and `invoke why`, which need no engine."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from sparkpin.cli.options import Json
from sparkpin.cli.tasks import task
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import show, show_json
from sparkpin.history.diff_text import difference_json, difference_lines
from sparkpin.history.sides import difference
from sparkpin.history.why import find_origin, origin_lines


@task("releases")
def diff(
    paths: Paths,
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
    found = difference(paths, before, after)
    if json:
        show_json(difference_json(found))
    else:
        show("\n".join(difference_lines(found, all_files=files)))
    return int(exit_code and not found.identical)


@task("prove and carry")
def why(
    paths: Paths, tag: Annotated[str, "release"], path: Annotated[str, "in its image"], *, json: Json = False
) -> None:
    """Print which lock entry, stage and layer a file comes from."""
    origin = find_origin(paths, tag, path)
    if json:
        show_json(asdict(origin))
    else:
        show("\n".join(origin_lines(origin)))
