"""`invoke status`, `logs`."""

from __future__ import annotations

from typing import Annotated

from sparkpin.cli.tasks import Json, ServedRecipe, task
from sparkpin.core.paths import Paths
from sparkpin.host.engine import engine_of
from sparkpin.serve import logs as server_logs
from sparkpin.serve import status as serving


@task("serve")
def status(
    paths: Paths, *, json: Json = False, recipe: Annotated[str | None, "this recipe alone (default: all)"] = None
) -> None:
    """Print what is served, its health and load, and why it died.

    watch -n 2 invoke status
    """
    serving.status(paths, engine_of(paths), recipe, as_json=json)


@task("serve")
def logs(
    paths: Paths,
    *,
    recipe: ServedRecipe = None,
    lines: Annotated[int, "how many of the last lines (default: 100; 0: new ones alone)", "COUNT"] = 100,
    follow: Annotated[bool, "keep printing new lines, until Ctrl-C"] = False,
) -> None:
    """Print a server's log, without health checks.

    invoke logs -f -n 50
    """
    server_logs.logs(paths, engine_of(paths), recipe, lines=lines, follow=follow)
