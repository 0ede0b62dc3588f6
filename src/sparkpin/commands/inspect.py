"""`invoke inspect`."""

from __future__ import annotations

from pathlib import Path

from sparkpin.build.make import engine_of
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say
from sparkpin.smoke.inspect import run as inspecting


def inspect(subject: str, *, sm: str, platform: str, everything: bool, as_json: bool) -> None:
    paths = Paths.from_env()
    inspecting.check(paths, subject, sm=sm, platform=platform)
    engine = None if Path(subject).is_dir() else engine_of(paths)
    result = inspecting.inspect(paths, engine, subject, sm=sm, platform=platform, say=say)
    inspecting.show(result, everything=everything, as_json=as_json)
