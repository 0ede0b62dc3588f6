"""`invoke status`, `logs`."""

from __future__ import annotations

from sparkpin.core.paths import Paths
from sparkpin.host.engine import engine_of
from sparkpin.serve import status as serving


def status(*, as_json: bool) -> None:
    paths = Paths.from_env()
    serving.status(paths, engine_of(paths), as_json=as_json)


def logs(*, recipe: str | None, lines: int, follow: bool) -> None:
    paths = Paths.from_env()
    serving.logs(paths, engine_of(paths), recipe, lines=lines, follow=follow)
