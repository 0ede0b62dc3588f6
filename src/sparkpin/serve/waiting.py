"""Wait for a server: its progress as a person sees it, and a real request as the only proof that it is ready."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from sparkpin.core.errors import SmokeError
from sparkpin.core.terminal import Say, count
from sparkpin.host.containers import Container, NotFound
from sparkpin.host.engine import engine_errors
from sparkpin.releases import container as running
from sparkpin.releases.record import Release
from sparkpin.serve import crash_facts, launch, linked, startup, startup_bar
from sparkpin.serve.postmortem import report

LOOK_SECONDS = 1.0  # at most: a short start is looked at more often
ASK_SECONDS = 15.0  # between two requests while the log does not say that it answers: its words may change


class Detached(Exception):
    """The person does not wait any longer; the server goes on starting. The text says what runs."""


def until_ready(
    container: Container, release: Release, timeout: float, folder: Path, say: Say, *, fresh: bool
) -> float:
    """Seconds that it took; kept in `folder` for the next time if this is a start from its begin (fresh).

    SmokeError with a post-mortem, kept in `folder`, as soon as the server ends, or when it does not answer within
    `timeout` seconds.
    """
    watched, before = startup.Startup(), startup.last(folder)
    begin = asked = time.monotonic()
    with startup_bar.shown(before, say) as view:
        while True:
            ended, log = look(container, release)
            now = time.monotonic()
            watched.update(log, now - begin)
            view.update(watched, log, now - begin)
            how = ended or (f"gave no answer within {timeout:.0f} s" if now - begin > timeout else None)
            if how:
                raise failure(container, release, how, folder)
            if watched.stage == startup.STAGES[-1] or now - asked > ASK_SECONDS:
                asked = now
                if launch.asks(container)[0]:
                    if watched.stage != startup.STAGES[-1]:  # it said so while it was asked
                        _, log = look(container, release)
                        watched.update(log, time.monotonic() - begin)
                    break
            time.sleep(min(LOOK_SECONDS, 0.1 + (now - begin) / 20))
    seconds = time.monotonic() - begin
    if fresh:
        startup.keep(folder, release, watched, seconds, log)
    return seconds


def look(container: Container, release: Release) -> tuple[str | None, bytes]:
    """Why it ended, None while it runs; and its log. SmokeError when somebody removed it."""
    with engine_errors():
        try:
            container.reload()
            how = crash_facts.how_ended(container)
            for machine, peer in linked.peers_of(container) if how is None else ():
                peer.reload()
                if ended := crash_facts.how_ended(peer) or ("stays down" if linked.stays_down(peer) else None):
                    how = f"at {machine.where} {ended}"
            return how, running.log_of(container)
        except NotFound:
            raise SmokeError(
                f"{release.tag} was stopped while it started", next_step=f"invoke serve {release.tag}"
            ) from None


def failure(container: Container, release: Release, how: str, folder: Path) -> SmokeError:
    found = crash_facts.examine(container, release.recipe, release.tag, how)
    kept = crash_facts.keep(folder, found)
    others = linked.deaths(container, release, folder)
    return SmokeError(
        "\n".join([f"{release.tag} did not become ready", *report(found), *others]),
        next_step=f"read {kept.with_name(crash_facts.LOG)}; invoke smoke {release.tag}",
    )


def quiet_moment(load: Callable[[], int | None], seconds: float, say: Say) -> bool:
    """Wait until no request is under way, at most `seconds`; whether that came. load: how many are; None when nobody
    can tell."""
    until, told = time.monotonic() + seconds, False
    while under_way := load():
        if time.monotonic() >= until:
            say(f"{count(under_way, 'request')} under way: broken off by the switch")
            return False
        if not told:
            say(f"waiting up to {seconds:.0f} s for a moment without requests ({under_way} under way)")
            told = True
        time.sleep(0.2)
    return under_way is not None
