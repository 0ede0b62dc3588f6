"""`invoke status`, `logs`."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Annotated

from sparkpin.cli.options import Json
from sparkpin.cli.tasks import task
from sparkpin.core.errors import DownError, EngineError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import show, tame
from sparkpin.host.engine import engine_of
from sparkpin.serve import status as serving


@task("serve")
def status(
    *,
    json: Json = False,
    env: Annotated[bool, "print OPENAI_BASE_URL and the key, for the eval of a shell"] = False,
    recipe: Annotated[str | None, "with --env: the recipe whose server is meant (default: the running one)"] = None,
    watch: Annotated[int | None, "repeat every so many seconds, until Ctrl-C", "SECONDS"] = None,
) -> None:
    """Print what is served, its health and load, and why it died.

    invoke status --watch 2
    eval "$(invoke status --env)"
    """
    paths = Paths.from_env()
    engine = engine_of(paths)
    if env:
        serving.show_env(paths, engine, recipe)
        return
    if watch is None:
        serving.status(paths, engine, as_json=json)
        return
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            if sys.stdout.isatty():
                show("\x1b[H\x1b[2J" + time.strftime("%X"))
            try:
                serving.status(paths, engine, as_json=json)
            except (DownError, EngineError) as error:  # an engine may be about to start again
                show(f"error: {tame(str(error))}")
            time.sleep(max(watch, 1))


@task("serve")
def logs(
    *,
    recipe: Annotated[str | None, "recipe whose server is meant (default: the running one)"] = None,
    lines: Annotated[int, "how many of the last lines (default: 100)", "COUNT"] = 100,
    follow: Annotated[bool, "keep printing new lines, until Ctrl-C"] = False,
) -> None:
    """Print a server's log, without health checks."""
    paths = Paths.from_env()
    serving.logs(paths, engine_of(paths), recipe, lines=lines, follow=follow)
