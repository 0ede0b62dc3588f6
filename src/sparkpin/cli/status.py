"""`invoke status`, `logs`."""

from __future__ import annotations

import contextlib
import sys
import time

from sparkpin.core.errors import DownError, EngineError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import show, tame
from sparkpin.host.engine import engine_of
from sparkpin.serve import status as serving


def status(*, as_json: bool, env: bool = False, recipe: str | None = None, watch: int | None = None) -> None:
    """env: print lines for a shell instead; watch: again each so many seconds, until Ctrl-C."""
    paths = Paths.from_env()
    engine = engine_of(paths)
    if env:
        serving.show_env(paths, engine, recipe)
        return
    with contextlib.suppress(KeyboardInterrupt) if watch is not None else contextlib.nullcontext():
        while True:
            if watch is not None and sys.stdout.isatty():
                show("\x1b[H\x1b[2J" + time.strftime("%X"))
            try:
                serving.status(paths, engine, as_json=as_json)
            except (DownError, EngineError) as error:  # an engine may be about to start again
                if watch is None:
                    raise
                show(f"error: {tame(str(error))}")
            if watch is None:
                return
            time.sleep(max(watch, 1))


def logs(*, recipe: str | None, lines: int, follow: bool) -> None:
    paths = Paths.from_env()
    serving.logs(paths, engine_of(paths), recipe, lines=lines, follow=follow)
