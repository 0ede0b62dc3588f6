"""From one server of a recipe to the next, with the shortest pause that memory allows, and back when the next fails."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from sparkpin.core.errors import SmokeError, SparkpinError
from sparkpin.core.paths import Paths
from sparkpin.core.terminal import say
from sparkpin.host.containers import Container
from sparkpin.host.engine import Engine, engine_errors
from sparkpin.releases.inside import PROMPT
from sparkpin.releases.record import Release
from sparkpin.serve import crash_facts, fronts, launch, linked, memory_limit, waiting
from sparkpin.serve.fronts import FrontOrder
from sparkpin.serve.launch import SOCKET_LABEL, LaunchOrder, requests_under_way
from sparkpin.serve.nodes import Checked
from sparkpin.serve.served import FORMER, FRONT, NEXT, RELEASE_LABEL, Served, client_of, describe, find, is_running
from sparkpin.serve.waiting import Detached

STOP_SECONDS = 30
DRAIN_SECONDS = 30.0  # for requests under way
ANSWER_SECONDS = 60.0


def launched(
    paths: Paths,
    engine: Engine,
    order: FrontOrder,
    old: Container | None,
    wanted: LaunchOrder,
    checked: Checked | None = None,
) -> Served:
    """Create, start and wait; the front says meanwhile that there is nobody. What does not become ready is removed.

    checked: the machines of a release that is for several.
    """
    name, folder = order.name, fronts.folder_of(old)
    container = linked.create(engine, name, wanted, checked, folder)

    try:
        with fronts.opened(engine, order, folder) as front:
            fronts.use(front, folder)
            try:
                with engine_errors():
                    container.start()
                say(f"started {name} from {wanted.release.tag}")
                try:
                    ready(paths, container, wanted, checked)
                except KeyboardInterrupt:
                    linked.keep_up(container, wanted, checked)
                    raise Detached(f"{name} goes on starting {wanted.release.tag}") from None
                answered(container, front, order.key)
            except Detached:
                raise
            except BaseException:
                if old is not None:
                    fronts.use(front, old.labels.get(SOCKET_LABEL, ""))
                raise
    except Detached:
        raise
    except BaseException:
        launch.remove(container)
        fronts.drop_sockets(engine, name)  # where there is no other server
        raise
    return told(container, front)


def told(container: Container, front: Container) -> Served:
    with engine_errors():
        container.reload()
        front.reload()
    return describe(container, front)


def ready(paths: Paths, container: Container, wanted: LaunchOrder, checked: Checked | None = None) -> None:
    """It answers a request from within, and from now on Docker keeps it up."""
    folder = crash_facts.folder_of(paths, wanted.release.recipe, wanted.release.name)
    seconds = waiting.until_ready(container, wanted.release, wanted.timeout, folder, fresh=True)
    if wanted.gpus and isinstance(wanted.checkpoint, Path):
        memory_limit.forget_files(wanted.checkpoint)
    linked.keep_up(container, wanted, checked)
    say(f"ready after {seconds:.0f} s")


def answered(container: Container, front: Container, key: str | None) -> None:
    """SmokeError unless a real request gets its answer at the address that clients use."""
    served = told(container, front)
    until, pause = time.monotonic() + ANSWER_SECONDS, 0.1
    while (fault := fault_of(served, key)) and time.monotonic() < until:
        time.sleep(pause)  # the front starts, and Docker publishes a port a moment after it says so
        pause = min(2 * pause, 2.0)  # a front may allow one request a second
    if fault:
        raise SmokeError(
            f"{served.release} answers within its container, and not at {served.url}: {fault}",
            next_step=f"docker logs {front.name}; is there a firewall or a proxy between?",
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
    paths: Paths, engine: Engine, order: FrontOrder, old: Container, wanted: LaunchOrder, drain: float
) -> Served:
    """Start the new one, and tell the front to ask it once it answers; requests under way stay with the old one."""
    name, folder, former = order.name, fronts.folder_of(old), old.labels.get(RELEASE_LABEL, order.name)
    say(f"memory is enough for both: {former} answers until {wanted.release.tag} does")
    container = launch.create(engine, name + NEXT, wanted, volume=name, folder=folder)
    try:
        with engine_errors():
            container.start()
        say(f"started {name}{NEXT} from {wanted.release.tag}")
        ready(paths, container, wanted)
        with fronts.opened(engine, order, folder) as front:
            try:
                fronts.use(front, folder)
                answered(container, front, order.key)
            except BaseException:
                fronts.use(front, old.labels.get(SOCKET_LABEL, ""))
                raise
    except BaseException:
        with contextlib.suppress(SparkpinError):
            launch.remove(container)
        say(f"{former} still answers")
        raise
    say(f"switched; stopping {former}")
    old.rename(name + FORMER)  # first, since stopping takes a while: from now on the new one is the recipe's server
    container.rename(name)
    waiting.quiet_moment(lambda: requests_under_way(old), drain)
    old.stop(timeout=STOP_SECONDS)
    launch.remove(old)
    return told(container, front)


def direct(engine: Engine, name: str, folder: str) -> None:
    """Have the front of a recipe, where it runs, ask the server in that folder from now on."""
    front = find(engine, name + FRONT)
    if front is not None and is_running(front):
        fronts.use(front, folder)


@contextlib.contextmanager
def replaced(engine: Engine, name: str, old: Container | None, release: Release, drain: float) -> Iterator[None]:
    """The recipe's container so far makes room; it is removed in the end, or started again when the new one fails."""
    was_running = old is not None and is_running(old)
    try:
        if old is not None:
            with engine_errors():
                if was_running:
                    if launch.asks(old)[0]:  # requests to a server that hangs stay under way for ever
                        # Nothing new comes in: nobody listens yet where the next server will. Clients are to try again.
                        direct(engine, name, fronts.folder_of(old))
                        waiting.quiet_moment(lambda: requests_under_way(old), drain)
                    say(f"stopping {old.labels.get(RELEASE_LABEL, name)}, which {release.tag} replaces")
                old.stop(timeout=STOP_SECONDS)
                old.rename(name + FORMER)
        yield
    except Detached:
        if old is not None:
            launch.remove(old)
        raise
    except BaseException:
        if old is not None:
            with engine_errors():
                old.reload()
                if old.name != name:
                    old.rename(name)
                if was_running:
                    direct(engine, name, old.labels.get(SOCKET_LABEL, ""))
                    if not is_running(old):
                        say(f"starting {old.labels.get(RELEASE_LABEL, name)} again")
                        old.start()
        raise
    if old is not None:
        launch.remove(old)
