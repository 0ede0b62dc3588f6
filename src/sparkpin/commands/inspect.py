"""`invoke inspect`."""

from __future__ import annotations

import contextlib
import json
import re
from pathlib import Path

from sparkpin.core import terminal
from sparkpin.core.errors import InputError, InspectionError
from sparkpin.core.paths import Paths
from sparkpin.host.engine import engine_of
from sparkpin.releases.record import Releases
from sparkpin.smoke.inspect import report
from sparkpin.smoke.inspect import run as inspecting
from sparkpin.smoke.inspect.gpu import KNOWN
from sparkpin.smoke.inspect.report import Result
from sparkpin.smoke.inspect.run import MAY_BE

# An image's name, as engines take it: [host:port/]name[:tag][@digest].
NAME = re.compile(r"[a-z0-9][a-z0-9._/-]*(:\d+/[a-z0-9._/-]+)?(:[\w.-]+)?(@sha256:[0-9a-f]{64})?", re.ASCII)


def inspect(subject: str, *, sm: str, platform: str, everything: bool, as_json: bool) -> None:
    """sm, platform: "" for what the image and its stack say."""
    paths, asked = Paths.from_env(), known_sm(sm)
    inspecting.known_platform(platform)
    check(paths, subject)
    engine = None if Path(subject).is_dir() else engine_of(paths)
    result = inspecting.inspect(paths, engine, subject, sm=asked, platform=platform, say=terminal.say)
    show(result, everything=everything, as_json=as_json)


def known_sm(asked: str) -> int | None:
    """121 for "121", "12.1" and "sm_121"; None for "". InputError for what is no GPU's compute capability."""
    if not asked:
        return None
    found = re.fullmatch(r"(?:sm_)?([0-9]{2,3})|([0-9]{1,2}\.[0-9])", asked)
    number = int((found[1] or found[2]).replace(".", "")) if found else 0
    if number not in KNOWN:
        raise InputError(
            f"--sm: saw {asked!r}, wanted a GPU's compute capability: 121, 12.1 or sm_121 (DGX Spark), 90 (H100), ...",
            next_step="for example --sm 121",
        )
    return number


def check(paths: Paths, subject: str) -> None:
    """InputError for what can be no folder, release or image, before an engine is asked for anything."""
    path = Path(subject)
    if path.is_dir():
        return
    if NAME.fullmatch(subject) and not path.exists():
        return
    with contextlib.suppress(InputError):
        Releases(paths).get(subject)
        return
    if path.exists():
        raise InputError(f"{subject} is a file; {MAY_BE}", next_step="unpack it into a folder, or invoke images")
    raise InputError(f"there is no folder {subject!r}; {MAY_BE}", next_step="invoke images lists the releases")


def show(result: Result, *, everything: bool, as_json: bool) -> None:
    """Print it; InspectionError, which says the verdict, where it fails."""
    if as_json:
        terminal.show(json.dumps(result.as_json(), indent=1))
    else:
        report.show(result, everything=everything)
    if errors := result.errors:
        raise InspectionError(f"{result.subject} {result.verdict}", next_step=errors[0].next_step)
    if not as_json:
        terminal.show(result.verdict)
