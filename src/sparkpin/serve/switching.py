"""From one server of a recipe to the next, with the shortest pause that memory allows, and back when the next fails."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from sparkpin.core.errors import SmokeError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import Say
from sparkpin.host.containers import Container
from sparkpin.host.engine import Engine, engine_errors
from sparkpin.releases.record import Release
from sparkpin.serve import crash_facts, launch, memory_limit, waiting
from sparkpin.serve.inside import PROMPT
from sparkpin.serve.launch import LaunchOrder
from sparkpin.serve.served import RELEASE_LABEL, Served, client_of, describe, is_running, requests_under_way

FORMER, NEXT = "-former", "-next"  # while one server takes another's place
STOP_SECONDS = 30
DRAIN_SECONDS = 30.0  # for requests under way, while the old server still takes new ones
ANSWER_SECONDS = 60.0


class Detached(Exception):
    """The person does not wait any longer; the server goes on starting. The text says what runs."""


def launched(paths: Paths, engine: Engine, name: str, wanted: LaunchOrder, say: Say) -> Served:
    """Create, start and wait. A container that does not become ready is removed again."""
    container = launch.create(engine, name, wanted, hidden=False)
    try:
        launch.start(engine, container, wanted.host, wanted.port)
        say(f"started {name} from {wanted.release.tag}")
        try:
            ready(paths, container, wanted, say)
        except KeyboardInterrupt:
            launch.keep_up(container, wanted.health)
            raise Detached(f"{name} goes on starting {wanted.release.tag}") from None
        answered(container, wanted, say)
    except Detached:
        raise
    except BaseException:
        launch.remove(container)
        raise
    container.reload()
    return describe(container)


def ready(paths: Paths, container: Container, wanted: LaunchOrder, say: Say) -> None:
    """It answers a request from within, and from now on Docker keeps it up."""
    folder = crash_facts.folder_of(paths, wanted.release.recipe, wanted.release.name)
    seconds = waiting.until_ready(container, wanted.release, wanted.timeout, folder, say, fresh=True)
    if wanted.gpus:
        memory_limit.forget_files(wanted.checkpoint)
    launch.keep_up(container, wanted.health)
    say(f"ready after {seconds:.0f} s")


def answered(container: Container, wanted: LaunchOrder, say: Say) -> None:
    """SmokeError unless a real request gets its answer at the address that clients use."""
    container.reload()
    served = describe(container)
    until = time.monotonic() + ANSWER_SECONDS
    while (fault := fault_of(served, wanted.key)) and time.monotonic() < until:
        time.sleep(0.1)  # Docker publishes a port a moment after it says so
    if fault:
        raise SmokeError(
            f"{served.release} answers within its container, and not at {served.url}: {fault}",
            next_step=f"invoke logs --recipe {served.recipe}; is there a firewall or a proxy between?",
        )
    say(f"answers at {served.url} (model {served.model})")


def fault_of(served: Served, key: str | None) -> str:
    """What is wrong with the answer to a real request; "" where nothing is."""
    from sparkpin.smoke.replies import Fault  # slow to import

    with client_of(served, key, timeout=ANSWER_SECONDS) as client:
        try:
            reply = client.post(
                "/v1/completions", {"model": served.model, "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
            )
        except Fault as fault:
            return str(fault)
    return "" if reply.status == 200 else f"{reply.status}: {reply.body.decode(errors='replace')[:200]}"


def taken_over(
    paths: Paths, engine: Engine, name: str, old: Container, wanted: LaunchOrder, drain: float, say: Say
) -> Served:
    """Start the new one hidden, and give it the port once it answers; until then, and if it fails, the old serves."""
    former = old.labels.get(RELEASE_LABEL, name)
    say(f"memory is enough for both: {former} answers until {wanted.release.tag} does")
    container = launch.create(engine, name + NEXT, wanted, hidden=True)
    quiet = True
    try:
        launch.start(engine, container, wanted.host, wanted.port)
        say(f"started {name}{NEXT} from {wanted.release.tag}")
        ready(paths, container, wanted, say)
        quiet = waiting.quiet_moment(lambda: requests_under_way(old), drain, say)
        began = time.monotonic()
        if quiet:
            launch.disconnect(engine, old)
        try:
            if not quiet:
                # Its connections are to be closed. Were it only cut off, clients of other machines would wait for an
                # answer until their own time is up: nobody would tell them.
                launch.end(old)
            launch.connect(engine, container, wanted.host, wanted.port)
            answered(container, wanted, say)
        except BaseException:
            launch.remove(container)
            known = describe(old)
            give_back = launch.connect if quiet else launch.start
            give_back(engine, old, known.host, known.port)
            raise
    except BaseException:
        with contextlib.suppress(SparkpinError):
            launch.remove(container)
        say(f"{former} still answers" if quiet else f"starting {former} again")
        raise
    say(f"switched after {time.monotonic() - began:.1f} s; stopping {former}")
    old.rename(name + FORMER)  # first, since stopping takes a while: from now on the new one is the recipe's server
    container.rename(name)
    old.stop(timeout=STOP_SECONDS)
    launch.remove(old)
    container.reload()
    return describe(container)


@contextlib.contextmanager
def replaced(
    engine: Engine, name: str, old: Container | None, release: Release, drain: float, say: Say
) -> Iterator[None]:
    """The recipe's container so far makes room; it is removed in the end, or started again when the new one fails."""
    with engine_errors():
        was_running = old is not None and is_running(old)
        if old is not None:
            if was_running:
                if describe(old).ready:  # requests to a server that hangs stay under way for ever
                    waiting.quiet_moment(lambda: requests_under_way(old), drain, say)
                say(f"stopping {old.labels.get(RELEASE_LABEL, name)}, which {release.tag} replaces")
            old.stop(timeout=STOP_SECONDS)
            old.rename(name + FORMER)
    try:
        yield
    except Detached:
        if old is not None:
            launch.remove(old)
        raise
    except BaseException:
        if old is not None:
            with engine_errors():
                old.rename(name)
                if was_running:
                    say(f"starting {old.labels.get(RELEASE_LABEL, name)} again")
                    old.start()
        raise
    if old is not None:
        launch.remove(old)
