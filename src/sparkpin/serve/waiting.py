"""Wait for a server: its progress as a person sees it, and a real request as the only proof that it is ready."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import BaseModel

from sparkpin.core import files
from sparkpin.core.errors import SmokeError
from sparkpin.core.terminal import count, say
from sparkpin.host.containers import NotFound
from sparkpin.host.engine import engine_errors
from sparkpin.releases import container as running
from sparkpin.releases.postmortem import report
from sparkpin.releases.record import Release
from sparkpin.serve import crash_facts, launch, linked
from sparkpin.serve.linked import Part
from sparkpin.smoke.startup import NotReady, StartFault, Startup, load_format, wait_for_answer, weights_seconds

ASK_SECONDS = 15.0  # between two requests while the log does not say that it answers: each starts a program


class Detached(Exception):
    """The person does not wait any longer; the server goes on starting. The text says what runs."""


def until_ready(parts: Sequence[Part], release: Release, timeout: float, folder: Path, *, fresh: bool) -> float:
    """Seconds that it took; kept in `folder` for the next time if this is a start from its begin (fresh).

    NotReady with a post-mortem, kept in `folder`, as soon as the server ends, or when it does not answer within
    `timeout` seconds.
    """
    if last := last_start(folder):
        say(f"the last start took {last.seconds:.0f} s")
    ask = lambda: launch.asks(parts[0].container)  # noqa: E731
    try:
        seconds, watched = wait_for_answer(lambda: look(parts, release), ask, timeout, every=ASK_SECONDS)
    except StartFault as fault:
        raise failure(parts, release, str(fault), folder) from None
    if fresh:
        keep_start(folder, release, watched, seconds, look(parts, release)[1])
    return seconds


def look(parts: Sequence[Part], release: Release) -> tuple[str | None, bytes]:
    """Why it ended, None while it runs; and its log. SmokeError when somebody removed it."""
    with engine_errors():
        try:
            for part in parts:
                part.container.reload()
                how = crash_facts.how_ended(part.container)
                if not part.is_here and (how or crash_facts.stays_down(part.container)):
                    how = f"at {part.machine.where} {how or 'stays down'}"
                if how:
                    break
            return how, running.log_of(parts[0].container)
        except NotFound:
            raise SmokeError(
                f"{release.tag} was stopped while it started", next_step=f"invoke serve {release.tag}"
            ) from None


def failure(parts: Sequence[Part], release: Release, how: str, folder: Path) -> NotReady:
    found = crash_facts.examine(parts[0].container, release.recipe, release.tag, how)
    report_file = crash_facts.keep(folder, found)
    others = linked.deaths(parts, release, folder)
    return NotReady(
        "\n".join([f"{release.tag} did not become ready", *report(found), *others]),
        (found.log,),
        next_step=f"read {report_file.with_name(crash_facts.LOG)}; invoke smoke {release.tag}",
    )


def wait_quiet(load: Callable[[], int | None], seconds: float) -> bool:
    """Wait until no request is under way, at most `seconds`; whether that came. load: how many are; None where it is
    not known, which does not mean that there are none."""
    until, waits = time.monotonic() + seconds, False
    while (under_way := load()) != 0:
        if time.monotonic() >= until:
            what = "it is not known how many requests are" if under_way is None else count(under_way, "request")
            say(f"{what} under way after {seconds:.0f} s: broken off (--drain gives more time)")
            return False
        if not waits:
            say(f"waiting up to {seconds:.0f} s for requests under way to end ({under_way})")
            waits = True
        time.sleep(0.2)
    return True


START_FILE = "start.json"


class LastStart(BaseModel):
    """What the last start of a release took on this machine. seconds: until it answered; began: see Startup."""

    seconds: float
    began: dict[str, float]


def keep_start(folder: Path, release: Release, startup: Startup, seconds: float, log: bytes) -> None:
    """log: of this start alone. What it says that reading the weights took is kept, None where it says nothing."""
    value = {
        "schema": 1,
        "release": release.tag,
        "seconds": round(seconds, 1),
        "began": startup.began,
        "load_format": load_format(release.argv),
        "weights_seconds": weights_seconds(log),
    }
    files.write_json(folder / START_FILE, value)


def last_start(folder: Path) -> LastStart | None:
    """Of the release whose folder it is, else the newest of its recipe. None where there is none, or none that can be
    read: it is a hint and nothing more."""
    with contextlib.suppress(OSError, ValueError):
        others = sorted(folder.parent.glob(f"*/{START_FILE}"), key=lambda path: path.stat().st_mtime)
        path = next((path for path in (folder / START_FILE, *reversed(others)) if path.is_file()), folder / START_FILE)
        return LastStart.model_validate_json(path.read_bytes())
    return None
